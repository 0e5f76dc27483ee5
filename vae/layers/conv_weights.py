"""Weights in the shapes that calls need, kept beside the parameter they were derived from."""

import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# oneDNN's own weight layouts are for x86; on Arm other libraries stand behind its name.
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


@dataclass(frozen=True)
class Form:
    """A weight in the shape that a call needs, with what tells whether it is still true.

    Attributes:
        weight: The weight.
        packed: It is in oneDNN's layout.
        offset: What was derived of the biases; None: nothing.
        sources: The parameters that it was derived from.
        stamps: Of each of them, see `stamp_of`.
        checksum: Of all of them, see `checksum_of`.
    """

    weight: Tensor
    packed: bool
    offset: Tensor | None
    sources: tuple[weakref.ref[Tensor], ...]
    stamps: tuple[tuple[object, ...], ...]
    checksum: Tensor

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it was derived from, as they were then."""
        return all(
            source() is now and stamp == stamp_of(now)
            for source, stamp, now in zip(self.sources, self.stamps, sources, strict=True)
        )


def derived(
    weight: Tensor, offset: Tensor | None, sources: Sequence[Tensor], *, packed: bool
) -> Form:
    """Keep a form with what tells of its parameters now."""
    return Form(
        weight,
        packed,
        offset,
        tuple(weakref.ref(source) for source in sources),
        tuple(stamp_of(source) for source in sources),
        checksum_of(sources),
    )


class Forms(dict[tuple[str, torch.dtype], Form]):
    """The derived weights of one convolution; a copied or pickled module starts without any."""

    def __deepcopy__(self, memo: object) -> "Forms":
        return Forms()

    def __reduce__(self) -> tuple[type["Forms"], tuple[()]]:
        return Forms, ()


def packs(x: Tensor) -> bool:
    """Whether oneDNN's blocked weights and its fused sum are there for this input."""
    return packs_for(x.device, x.dtype)


def packs_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Likewise for any input there."""
    backend = torch.backends.mkldnn
    if device.type != "cpu" or not _X86 or not backend.is_available() or not backend.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def stamp_of(weight: Tensor) -> tuple[Any, ...]:
    """What changes when a parameter is moved, cast or written to by a recorded operation."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device


def checksum_of(sources: Sequence[Tensor]) -> Tensor:
    """The sums of dense tensors' memory, read as 64-bit integers, of each a multiple of its own."""
    return sum(
        ((2 * n + 1) * _sum_of(source) for n, source in enumerate(sources)), 0 * _sum_of(sources[0])
    )


def _sum_of(weight: Tensor) -> Tensor:
    flat = weight.detach().as_strided((weight.numel(),), (1,))
    offset = flat.storage_offset() * flat.element_size()
    words = flat.nbytes % 8 == 0 and offset % 8 == 0
    return flat.view(torch.int64 if words else torch.uint8).sum(dtype=torch.int64)


def own_bytes(form: Tensor, parameter: Tensor) -> int:
    """Bytes of a form, which may be the parameter itself."""
    if form.is_mkldnn:
        return form.numel() * form.element_size()
    return 0 if form.data_ptr() == parameter.data_ptr() else form.untyped_storage().nbytes()


def folded(weight: Tensor) -> Tensor:
    """The taps of `resample.UpsampleConv2d`: `[C_out, C_in, 3, 3]` to `[4 * C_out, C_in, 2, 2]`."""
    wide = weight if weight.dtype == torch.float64 else weight.float()
    # Rows of the even phase see (above, here + here), of the odd one (here + here, below).
    spread = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]).to(wide)
    phases = torch.einsum("apk,bql,oikl->aboipq", spread, spread, wide)
    return phases.flatten(0, 2)
