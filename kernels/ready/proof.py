"""Proof that a tile of ours is faster than the library on a chip without an entry in the table.

It uses the user's own call: at the third call of a kind, both run on the same tensors, the tile
into scratch memory, between events on the device. The background thread reads times and difference
after the video. No caller waits, and no kind is proved twice on a machine.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import routes
from ..backends import SIGNATURES, Kernel, within
from ..convolution.weight import ConvWeight
from ..devices import memory_bytes, runtime
from ..errors import Refusal, is_out_of_memory
from ..modules import ask
from . import background, serving, variants

# The call of a kind that is used: the first ones load kernels and workspaces.
_CALL = 3

# Multiply-adds of a frame from which on a tile can matter: 1e10 take 50 us at 400 TFLOP/s. The
# layers with 16 or 3 channels have less, about 1 % of a decode of Wan 2.1.
_PRODUCTS = 1e10

# What is proved: the first tile of a chip.
_TILE = Kernel("triton", 0)

# Results may differ by two roundings of bfloat16, of which each has been checked on its own.
_DIFFERENCE = torch.finfo(torch.bfloat16).eps

# Types of devices whose events have times in every supported PyTorch.
_TIMED = ("cuda", "xpu")

_current: ContextVar["Proofs | None"] = ContextVar("proofs", default=None)

# The proofs that calls in this thread may make; None: none.
current_proofs = _current.get

_calls: Counter[routes.ProofKey] = Counter()
_lock = threading.Lock()
_begun: set[routes.ProofKey] = set()


class _Pending(NamedTuple):
    """A proof whose numbers are on the device."""

    key: routes.ProofKey
    events: list[Any]  # before and after the tile, before and after the library
    difference: Tensor  # root mean square of the difference over that of the library's result


class Proofs:
    """The proofs of one video, at most some, in the memory that it leaves."""

    def __init__(self, room_bytes: int, most: int) -> None:
        self._room_bytes, self._most = room_bytes, most
        self._pending: list[_Pending] = []

    def proved(
        self, key: routes.ProofKey, args: tuple[Any, ...], plain: Callable[[], Tensor]
    ) -> Tensor:
        """Run a call of the library, `plain`, and perhaps a tile next to it; return its result."""
        # `args` are those of a launch, without the tile. Nothing is converted before the proof
        # itself: this is a call of every layer.
        x, weight = args[:2]
        products = x.shape[-2] * x.shape[-1] * math.prod(weight.shape)
        is_wanted = key not in _begun and products >= _PRODUCTS and key.device.type in _TIMED
        if not is_wanted or len(self._pending) >= self._most:
            return plain()
        args = *args, _TILE.tile
        variant = variants.key_of("conv3d", args, key.device, _TILE)
        variant = variant._replace(kinds=(key.dtype, *variant.kinds[1:]))
        if not serving.kernel_of(
            variant, lambda: variants.samples_of("conv3d", _in(key.dtype, args), variant)
        ):
            return plain()
        # Copies in another dtype, the result, and the difference.
        scratch = 2 * (x.nbytes + x.nbytes * weight.shape[0] // weight.shape[1])
        with _lock:
            _calls[key] += 1
            is_third = _calls[key] >= _CALL and key not in _begun
            is_ready = is_third and scratch <= self._room(key.device)
            if is_ready:
                _begun.add(key)
        if not is_ready:
            return plain()
        events = [runtime(key.device).Event(enable_timing=True) for _ in range(4)]
        try:
            given = _in(key.dtype, args)
            events[0].record()
            made = ask(_TILE.backend, "conv3d", *given)
            events[1].record()
        except Exception as error:
            if not (isinstance(error, Refusal) or is_out_of_memory(error)):
                raise
            return plain()
        events[2].record()
        y = plain()
        events[3].record()
        self._pending.append(_Pending(key, events, _difference(made, y)))
        return y

    def close(self) -> None:
        """Let the thread read the numbers when the device has them."""
        pending, self._pending = self._pending, []
        if pending:
            background.submit("the proof of kernels", lambda: _read(pending))

    def _room(self, device: torch.device) -> int:
        memory = memory_bytes(device)
        return self._room_bytes if memory is None else min(self._room_bytes, memory[0])


def proving(proofs: Proofs | None) -> AbstractContextManager[object]:
    """Let calls in this thread make `proofs` until the end of the block."""
    return within(_current, proofs)


def _in(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call with its activations and weight in the dtype of the tile, into new memory."""
    given: dict[str, Any] = dict(zip(SIGNATURES["conv3d"], args, strict=True)) | {"out": None}
    weight: ConvWeight = given["weight"]
    if weight.dtype != dtype:
        given["weight"] = ConvWeight(
            weight.shape, dtype, weight.device, lambda: weight.plain().to(dtype), keeps=False
        )
        for name in ("x", "tail", "residual"):
            given[name] = None if given[name] is None else given[name].to(dtype)
    return tuple(given.values())


def _difference(made: Tensor, plain: Tensor) -> Tensor:
    """Return the root mean square of the difference `[...]` over that of `plain`, on the device."""
    axis = 2 if plain.ndim == 5 else 0
    sums = torch.zeros(2, dtype=torch.float32, device=plain.device)
    for mine, other in zip(made.unbind(axis), plain.unbind(axis), strict=True):
        sums[0] += (mine.to(other.dtype) - other).square_().sum(dtype=torch.float32)
        sums[1] += other.square().sum(dtype=torch.float32)
    return (sums[0] / sums[1]).sqrt()


def _read(pending: list[_Pending]) -> None:
    for key, events, difference in pending:
        events[-1].synchronize()
        share = difference.item()
        tile_ms = events[0].elapsed_time(events[1])
        plain_ms = events[2].elapsed_time(events[3])
        right = math.isfinite(share) and share <= _DIFFERENCE
        routes.keep_proof(key, routes.Proof(plain_ms, tile_ms, right=right))
