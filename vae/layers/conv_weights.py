"""Weights in the forms that calls need, cached with the parameter they are derived from."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels import ConvWeight, sums_float64, synchronize
from .inputs.coded_weights import coded_weight

# Forms of larger weights are not kept, because those of Wan 2.2 would double its 705 M. The
# convolution then reorders the weight in each call: 57 ms instead of 30 for 1024 channels in bf16,
# and 190 with a separate copy and reordering. The weights of Wan 2.1 (4.0 M at most) are kept, and
# so are summed forms, which are smaller and slower to derive.
_KEPT_ELEMENTS = 6_000_000
_SUMS = ("folded", "summed", "shuffled")

# Dtypes whose norms change with their values.
_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Form:
    """A weight in the form of a call, with the state of its parameters."""

    weight: ConvWeight  # The weight, derived with the first call
    offset: Tensor | None = None  # Values derived from biases; None: there are none
    sources: tuple[weakref.ref[Tensor], ...] = ()  # The parameters that it was derived from
    stamps: tuple[tuple[object, ...], ...] = ()  # `stamp_of` each of them
    marks: tuple[Tensor, ...] = ()  # `marks_of` them; empty: the form is not kept

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Return whether `sources` `[...]` are the parameters of the form, unchanged."""
        return all(
            source() is now and stamp == stamp_of(now)
            for source, stamp, now in zip(self.sources, self.stamps, sources, strict=True)
        )


@dataclass(frozen=True)
class CodedForm(Form):
    """A weight in int8, for codes."""

    scale: Tensor = field(kw_only=True)  # `[C_out]`, float32: factors of the sums
    codes: Tensor = field(kw_only=True)  # `[C_in]`, float32: codes per unit of the inputs


def kept_form(weight: ConvWeight, offset: Tensor | None, sources: Sequence[Tensor]) -> Form:
    """Return a form to keep, with the state of its `sources`."""
    references = tuple(weakref.ref(source) for source in sources)
    stamps = tuple(stamp_of(source) for source in sources)
    return Form(weight, offset, references, stamps, marks_of(sources))


def coded_form(weight: Tensor, kind: str, steps: Tensor, sources: Sequence[Tensor]) -> CodedForm:
    """Return a kept form in int8, with a dimension of time, for inputs of `steps` `[C_in]`."""
    taps = derive(weight, kind, torch.float32)
    taps = taps.unsqueeze(2) if taps.ndim == 4 else taps
    coded, scale = coded_weight(taps, steps)
    coded = coded.contiguous(memory_format=torch.channels_last_3d)
    kept = ConvWeight(coded.shape, torch.int8, coded.device, lambda: coded)
    plain = kept_form(kept, None, sources)
    state = plain.sources, plain.stamps, plain.marks
    return CodedForm(kept, None, *state, scale=scale, codes=steps.reciprocal())


def keeps_form(kind: str, numbers: int) -> bool:
    """Return whether a form of `kind` of a weight with `numbers` elements is kept."""
    return numbers <= _KEPT_ELEMENTS or kind in _SUMS


def form_shape(weight: Tensor, kind: str) -> tuple[int, ...]:
    """Return the shape of `derive(weight, kind)` for a parameter `[C_out, C_in, ...]`."""
    outputs, inputs, *taps = weight.shape
    if kind == "volume":
        return tuple(weight.shape)
    height, width = taps[-2:]
    if kind == "folded":
        return 4 * outputs, inputs, 2, 2
    grown = int(kind == "shifted")
    return outputs, inputs, height + grown, width + grown


def derive(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the weight for calls of a kind, channels-last; it can be the parameter itself.

    `volume`: all taps. `frame`: the last temporal tap. `summed`: the sum of the temporal taps.
    `folded`: the phases of `UpsampleConv2d`. `shifted`: with a row and a column of zero taps in
    front. Sums are computed in float32 or wider.
    """
    if kind == "summed" and weight.ndim == 5:
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.sum(2, dtype=wide).to(dtype)
    elif kind == "folded":
        weight = folded(weight).to(dtype)
    else:
        weight = weight.to(dtype)
    if kind == "volume":
        return weight.contiguous(memory_format=torch.channels_last_3d)
    if kind == "frame" and weight.ndim == 5:
        weight = weight[:, :, -1]
    if kind == "shifted":
        grown = weight.new_zeros(*weight.shape[:2], weight.shape[2] + 1, weight.shape[3] + 1)
        grown[:, :, 1:, 1:] = weight
        weight = grown
    return weight.contiguous(memory_format=torch.channels_last)


def folded(weight: Tensor) -> Tensor:
    """Fold `weight` `[C_out, C_in, 3, 3]` of `UpsampleConv2d` to `[4 * C_out, C_in, 2, 2]`."""
    wide = weight if weight.dtype == torch.float64 else weight.float()
    # Rows of the even phase see (above, here + here), rows of the odd one (here + here, below).
    spread = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]).to(wide)
    phases = torch.einsum("apk,bql,oikl->aboipq", spread, spread, wide)
    return phases.flatten(0, 2)


def marks_of(sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a number `[]` for each of `sources` `[...]` that changes with its values.

    Where float64 is fast it is the norm, from a few launches for all sources on a GPU:
    a sum per weight would take 200 for Wan 2.1. Elsewhere it is the sum of the memory as integers.
    """
    marks: dict[int, Tensor] = {}
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for source in sources:
        if sums_float64(source.device) and source.dtype in _NORM_DTYPES:
            groups.setdefault((source.dtype, source.device), []).append(source)
        else:
            marks[id(source)] = _sum_of(source)
    for group in groups.values():
        norms = torch._foreach_norm(group, dtype=torch.float64)  # type: ignore[attr-defined]
        marks |= zip(map(id, group), norms, strict=True)
    return tuple(marks[id(source)] for source in sources)


def stamp_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what changes if `weight` `[...]` is moved, cast or written to by a recorded op."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device


def own_bytes(form: Tensor, parameter: Tensor) -> int:
    """Return the bytes of `form` `[...]`, 0 if it shares the memory of `parameter`."""
    if form.is_mkldnn:
        return form.numel() * form.element_size()
    return 0 if form.data_ptr() == parameter.data_ptr() else form.untyped_storage().nbytes()


def _sum_of(weight: Tensor) -> Tensor:
    flat = weight.detach().as_strided((weight.numel(),), (1,))
    offset = flat.storage_offset() * flat.element_size()
    words = flat.nbytes % 8 == 0 and offset % 8 == 0
    return flat.view(torch.int64 if words else torch.uint8).sum(dtype=torch.int64)


def proved_copy(source: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `source` `[...]` on a device whose way back gives the same bits."""
    synchronize(source.device)
    copy = source.to(device)
    if torch.equal(copy.to(source.device), source):
        return copy
    # The bytes alone, as what was wrong can be in layouts or dtypes.
    flat = source.contiguous().flatten().view(torch.uint8)
    copy = flat.to(device)
    if torch.equal(copy.to(source.device), flat):
        return copy.view(source.dtype).view(source.shape)
    raise ValueError(
        f"copies of the weights from {source.device} are wrong; expected a VAE that is loaded on "
        f"{device}"
    )
