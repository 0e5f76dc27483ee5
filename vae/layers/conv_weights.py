"""The forms of weights that calls need, and numbers that change with a weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import sums_float64, synchronize

# Forms of larger weights are not kept, because those of Wan 2.2 would double its 705 M. The
# convolution then reorders the weight in each call: 57 ms instead of 30 for 1024 channels in bf16,
# and 190 with a separate copy and reordering. The weights of Wan 2.1 (4.0 M at most) are kept, and
# so are summed forms, which are smaller and slower to derive.
_KEPT_ELEMENTS = 6_000_000
_SUMS = ("folded", "summed", "shuffled")

# Dtypes whose norms change with their values.
_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The largest code of a weight.
_LARGEST = 127

# Elements of a block of output channels that is coded at once: each needs 24 bytes for the order.
_BLOCK = 1 << 22


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
    for source in {id(source): source for source in sources}.values():
        if sums_float64(source.device) and source.dtype in _NORM_DTYPES:
            groups.setdefault((source.dtype, source.device), []).append(source)
        else:
            marks[id(source)] = _sum_of(source)
    for group in groups.values():
        norms = torch._foreach_norm(group, dtype=torch.float64)  # type: ignore[attr-defined]
        marks |= zip(map(id, group), norms, strict=True)
    return tuple(marks[id(source)] for source in sources)


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


def coded_weight(weight: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in int8, for inputs of `steps` `[C_in]`, and its scales `[C_out]`, float32.

    `sum(code * weight) * scale` is the convolution of the values, less the zeros of the codes. The
    scale ends at the largest weight of an output channel: clipped weights gain 0.1 dB at most.
    """
    shape = (1, -1, *[1] * (weight.ndim - 2))
    coded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = steps.new_empty(weight.shape[0])
    rows = max(1, _BLOCK // max(1, weight.shape[1:].numel()))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        wide = weight[part].float() * steps.view(shape)
        scale = wide.flatten(1).abs().amax(1).div_(_LARGEST)
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        exact = wide.div_(scale.view(-1, *[1] * (weight.ndim - 1)))
        coded[part] = _balanced(exact.flatten(2)).view(exact.shape).to(torch.int8)
        scales[part] = scale
    return coded, scales


def _balanced(exact: Tensor) -> Tensor:
    """Round `exact` `[C_out, C_in, taps]` so that the sums of taps are rounded to nearest."""
    # The taps of one input and one output channel meet neighbouring pixels, which are similar, so
    # their errors add up. The weights nearest to a half go the other way: 0.5 dB.
    codes = exact.round()
    errors = exact - codes
    missing = errors.sum(2, keepdim=True).round_()
    sign = missing.sign()
    # A tap at the end of the range stays, and so does one whose error has the other sign.
    may_move = (codes.abs() < _LARGEST) & (errors * sign > 0)
    order = (errors * sign).masked_fill_(~may_move, -1).argsort(stable=True, dim=2, descending=True)
    count = torch.arange(order.shape[2], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(2, order, count)
    return codes + sign * ((place < missing.abs()) & may_move)
