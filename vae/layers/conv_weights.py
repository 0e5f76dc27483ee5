"""Weights in the forms that calls need, cached with the parameter they are derived from."""

import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# oneDNN's own weight layouts exist on x86 only; on Arm other libraries run under its name.
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

# A convolution to few channels leaves most of a vector of 16 unused: 96 to 3 channels ran at a
# seventh of the speed of 96 to 96. So 4 neighbours in a row become one pixel of four times as many
# channels: 10.5 ms instead of 18.9 for 2 x 192 x 192 in bf16, 40 instead of 63 in fp32.
SPREAD = 4
VECTOR = 16

# cuDNN's tensor-core kernels for NHWC take multiples of this many channels; with the 3 or 12 of a
# picture it converts layouts or uses no tensor cores. Zeros fill the rest.
_ALIGNED = ("cuda",)
_PLAIN = ("volume", "frame", "summed")
_CHANNELS = 8
ALIGNED = ", aligned"

# Forms of larger weights are not kept, because those of Wan 2.2 would double its 705 M. The
# convolution then reorders the weight in each call: 57 ms instead of 30 for 1024 channels in bf16,
# and 190 with a separate copy and reordering. The weights of Wan 2.1 (4.0 M at most) are kept, and
# so are summed forms, which are smaller and slower to derive.
_KEPT_ELEMENTS = 6_000_000
_SUMS = ("folded", "summed", "shuffled")

# Taps are turned to a ring of frames if a frame has at least this many times as many elements as
# the weight. Otherwise the turned weights would cost more memory than the frames of a tail.
_TURNED = "volume, turned "
_FRAME_TO_WEIGHT = 8


@dataclass(frozen=True)
class Form:
    """A weight in the form of a call, with the state of its parameters.

    Attributes:
        weight: The weight.
        offset: Values derived from biases; None: there are none.
        packed: The weight is in oneDNN's layout.
        sources: The parameters that it was derived from.
        stamps: `stamp_of` each of them.
        checksum: `checksum_of` all of them; None: the form is not kept.
    """

    weight: Tensor
    offset: Tensor | None = None
    packed: bool = False
    sources: tuple[weakref.ref[Tensor], ...] = ()
    stamps: tuple[tuple[object, ...], ...] = ()
    checksum: Tensor | None = None

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Return whether `sources` `[...]` are the parameters of the form, unchanged."""
        return all(
            source() is now and stamp == stamp_of(now)
            for source, stamp, now in zip(self.sources, self.stamps, sources, strict=True)
        )


class Forms(dict[tuple[str, torch.dtype], Form]):
    """The derived weights of one convolution; a copied or pickled module starts without any."""

    def __deepcopy__(self, memo: object) -> "Forms":
        return Forms()

    def __reduce__(self) -> tuple[type["Forms"], tuple[()]]:
        return Forms, ()


def derived(
    weight: Tensor, offset: Tensor | None, sources: Sequence[Tensor], *, packed: bool
) -> Form:
    """Return a form to keep.

    Args:
        weight: The derived weight, such as `[C_out, C_in, kh, kw]`.
        offset: Values derived from biases, or None.
        sources: The parameters, whose state is recorded.
        packed: The weight is in oneDNN's layout.

    Returns:
        The form.
    """
    references = tuple(weakref.ref(source) for source in sources)
    stamps = tuple(stamp_of(source) for source in sources)
    return Form(weight, offset, packed, references, stamps, checksum_of(sources))


def keeps_form(kind: str, numbers: int) -> bool:
    """Return whether a form of `kind` of a weight with `numbers` elements is kept."""
    return numbers <= _KEPT_ELEMENTS or kind.startswith(_SUMS)


def turned(oldest: int) -> str:
    """Return the form for a ring of frames whose `oldest` frame is at this position."""
    return f"{_TURNED}{oldest}" if oldest else "volume"


def turns(weight_numel: int, frame_numel: int) -> bool:
    """Return whether taps are turned, for `weight_numel` and `frame_numel` elements."""
    return keeps_form("volume", weight_numel) and _FRAME_TO_WEIGHT * weight_numel <= frame_numel


def aligns(x: Tensor, weight: Tensor, kind: str) -> bool:
    """Return whether channels are filled up.

    Args:
        x: The input, `[B, C_in, ...]`.
        weight: The parameter, `[C_out, C_in, ...]`.
        kind: The form of the call.

    Returns:
        True for the first and last convolutions of a network on CUDA in 16 bits.
    """
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    odd = any(channels % _CHANNELS for channels in weight.shape[:2])
    return x.device.type in _ALIGNED and narrow and odd and kind.startswith(_PLAIN)


def widened(x: Tensor, channels: int) -> Tensor:
    """Return `x` `[B, C, ...]`, channels-last, with zeros up to `channels` channels."""
    rows = x.movedim(1, -1)
    wide = rows.new_zeros((*rows.shape[:-1], channels))
    wide[..., : x.shape[1]] = rows
    return wide.movedim(-1, 1)


def packs(x: Tensor) -> bool:
    """Return whether oneDNN's blocked weights and fused sum support `x` `[B, C, T, H, W]`."""
    return packs_for(x.device, x.dtype)


def packs_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN's blocked weights and fused sum support `device` and `dtype`."""
    backend = torch.backends.mkldnn
    if device.type != "cpu" or not _X86 or not backend.is_available() or not backend.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def derive(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the weight for calls of a kind; it can be the parameter itself.

    Args:
        weight: The parameter, `[C_out, C_in, ...]`.
        kind: `volume`: all taps. `frame`: the last temporal tap. `summed`: the sum of the temporal
            taps. `folded`: the phases of `UpsampleConv2d`. `shifted`: with a row and a column of
            zero taps in front. `volume, turned N`: tap 0 at position `N`, the others after it in a
            circle. `..., spread`: for `SPREAD` neighbours at once. `..., aligned`: with zeros up to
            whole groups of channels.
        dtype: Dtype of the result; sums are computed in float32 or wider.

    Returns:
        The derived weight, channels-last.
    """
    if kind.endswith(ALIGNED):
        return _aligned(derive(weight, kind.removesuffix(ALIGNED), dtype))
    if kind.endswith(", spread"):
        return _spread(derive(weight, kind.removesuffix(", spread"), dtype))
    if kind == "summed" and weight.ndim == 5:
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.sum(2, dtype=wide).to(dtype)
    elif kind == "folded":
        weight = folded(weight).to(dtype)
    else:
        weight = weight.to(dtype)
    if kind.startswith(_TURNED):
        weight = weight.roll(int(kind.removeprefix(_TURNED)), dims=2)
    if kind.startswith("volume"):
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


def checksum_of(sources: Sequence[Tensor]) -> Tensor:
    """Sum the memory of `sources` `[...]` as 64-bit integers, each with its own odd factor."""
    return sum(
        ((2 * n + 1) * _sum_of(source) for n, source in enumerate(sources)), 0 * _sum_of(sources[0])
    )


def stamp_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what changes if `weight` `[...]` is moved, cast or written to by a recorded op."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device


def own_bytes(form: Tensor, parameter: Tensor) -> int:
    """Return the bytes of `form` `[...]`, 0 if it shares the memory of `parameter`."""
    if form.is_mkldnn:
        return form.numel() * form.element_size()
    return 0 if form.data_ptr() == parameter.data_ptr() else form.untyped_storage().nbytes()


def _aligned(taps: Tensor) -> Tensor:
    """Return `taps` with zeros up to multiples of `_CHANNELS`."""
    order = torch.channels_last if taps.ndim == 4 else torch.channels_last_3d
    outputs, inputs = (-(-channels // _CHANNELS) * _CHANNELS for channels in taps.shape[:2])
    wide = taps.new_zeros(outputs, inputs, *taps.shape[2:])
    wide[: taps.shape[0], : taps.shape[1]] = taps
    return wide.contiguous(memory_format=order)


def _spread(taps: Tensor) -> Tensor:
    """Return the taps for `SPREAD` neighbours in a row at once, as channels."""
    order = torch.channels_last if taps.ndim == 4 else torch.channels_last_3d
    wide = taps.new_zeros(SPREAD, *taps.shape[:-1], taps.shape[-1] + SPREAD - 1)
    for at in range(SPREAD):
        wide[at, ..., at : at + taps.shape[-1]] = taps
    return wide.flatten(0, 1).contiguous(memory_format=order)


def _sum_of(weight: Tensor) -> Tensor:
    flat = weight.detach().as_strided((weight.numel(),), (1,))
    offset = flat.storage_offset() * flat.element_size()
    words = flat.nbytes % 8 == 0 and offset % 8 == 0
    return flat.view(torch.int64 if words else torch.uint8).sum(dtype=torch.int64)


def output_size(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the shape of a convolution's result, such as `[B, C_out, T, H, W]`.

    Args:
        shape: Shape of the input.
        weight_shape: Shape of the weight.
        stride: Stride of each dimension.
        padding: Padding of each dimension, on both sides.

    Returns:
        The shape.
    """
    axes = zip(shape[2:], weight_shape[2:], stride, padding, strict=True)
    return (
        shape[0],
        weight_shape[0],
        *((length + 2 * pad - taps) // step + 1 for length, taps, step, pad in axes),
    )
