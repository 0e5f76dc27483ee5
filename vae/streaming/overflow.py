"""Decodes in float16 or int8 that overflow: found piece by piece, and continued without.

float16 ends at 65504, where bfloat16 has the range of float32. What overflows becomes infinite, and
the next norm makes it NaN: nothing in the networks turns that into a finite number again. So a
finite piece proves that nothing overflowed in it, and one sum per piece shows that it is finite.

Underflow is not looked for: below 6e-5 float16 has fewer bits than above. Weights of published VAEs
are far larger, and norms keep the activations near 1.
"""

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import log_once
from ..layers.inputs.coding import Coding
from .options import StreamOptions
from .part import Part

_logger = logging.getLogger(__name__)

# Threads can decode with one VAE.
_lock = threading.Lock()


class Finding:
    """The examination of one piece, in parts and from threads of several devices."""

    def __init__(
        self, sides: dict[torch.device, torch.cuda.Stream], coding: Coding | None = None
    ) -> None:
        self._sides, self._coding = sides, coding
        # By thread, which has one device: the sum, and the event after it.
        self._sums: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._arrived: list[float] = []  # sums that have arrived with the frames

    def look(self, x: Tensor) -> None:
        """Examine a part `[B, C, n, H, W]` of the piece, without a wait for the device."""
        total = x.sum(dtype=torch.float32)  # finite for less than 5e33 finite ones in float16
        if self._coding is not None:
            total.add_(self._coding.verdict())  # without an allocation, which could fail
        thread = threading.get_ident()
        if thread in self._sums:
            before, summed = self._sums[thread]
            total.add_(before)
        else:
            summed = torch.cuda.Event() if x.device.type == "cuda" else None
        if summed is not None:
            summed.record(torch.cuda.current_stream(x.device))
        self._sums[thread] = total, summed

    def number(self) -> tuple[Tensor, Callable[[float], object]]:
        """Return the sum of this thread, `[]`, which is copied with its frames; and its reader."""
        return self._sums[threading.get_ident()][0], self._arrived.append

    def sent(self) -> None:
        """Note that the sum of this thread arrives with its frames, before they are written."""
        del self._sums[threading.get_ident()]

    def restart(self) -> None:
        """Forget the parts so far: the piece is computed again, some of it on other devices."""
        self._sums.clear()
        self._arrived = []  # a sum on its way goes to the old list

    def overflowed(self) -> bool:
        """Wait for the work on the piece, and return whether it has NaN or infinity."""
        read = (self._read(*each) for each in self._sums.values())
        return not all(map(math.isfinite, (*self._arrived, *read)))

    def sums(self) -> list[Tensor]:
        """Return the sums `[]` on their devices, ready for the current stream there."""
        for total, summed in self._sums.values():
            if summed is not None:
                torch.cuda.current_stream(total.device).wait_event(summed)
        return [total for total, _ in self._sums.values()]

    def _read(self, total: Tensor, summed: torch.cuda.Event | None) -> float:
        if summed is None:
            return total.item()
        # On a stream of its own: the device may compute the next piece already.
        summed.synchronize()
        side = self._sides.get(total.device)
        if side is None:
            side = self._sides[total.device] = torch.cuda.Stream(total.device)
        with torch.cuda.stream(side):
            return total.item()


class Watch:
    """Examines the pieces of one video for NaN and infinity, and for values out of int8."""

    def __init__(self, coding: Coding | None = None, *, at_end: bool = False) -> None:
        self.coding, self.at_end = coding, at_end
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._findings: deque[Finding] = deque()

    def next_piece(self) -> Finding:
        """Return the examination of the next piece."""
        self._findings.append(Finding(self._sides, self.coding))
        return self._findings[-1]

    def overflowed(self) -> bool:
        """Return whether the piece after the one of the last call has NaN or infinity."""
        return self._findings.popleft().overflowed()

    def first_overflow(self) -> int | None:
        """Return the number of the first piece with NaN or infinity; None: there is none."""
        sums: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, finding in enumerate(self._findings):
            for total in finding.sums():
                sums.setdefault(total.device, []).append((number, total))
        bad: list[int] = []
        for each in sums.values():
            numbers, totals = zip(*each, strict=True)
            finite = torch.stack(totals).isfinite().tolist()
            bad += [number for number, good in zip(numbers, finite, strict=True) if not good]
        return min(bad, default=None)


class NarrowVAE(Protocol):
    """What this module needs of a `VideoVAE`; see there."""

    allow_fp16: bool
    graphs: bool

    def drop_derived(self) -> None:
        """Free the weights in other dtypes and layouts."""


def allows_fp16(vae: NarrowVAE, options: StreamOptions) -> bool:
    """Return whether a decode may compute in float16: no dtype is chosen, and none overflowed."""
    return vae.allow_fp16 and options.dtype is None


def continued(
    vae: NarrowVAE,
    options: StreamOptions,
    part: Part,
    watch: Watch,
    narrow: Callable[[], Generator[Tensor, None, None]],
    wide: Callable[[Part], Iterator[Tensor]],
    *,
    as_images: bool,
) -> Iterator[Tensor]:
    """Yield the pieces of a decode in float16 until one overflows, then those of another decode."""
    # With `watch.at_end` only those of the other decode.
    at = part.first
    coded = watch.coding is not None
    if not (coded or allows_fp16(vae, options)):
        yield from wide(part.rest(at))
        return
    axis = 1 if as_images else 2
    with contextlib.closing(narrow()) as pieces:
        if watch.at_end:
            counts = [piece.shape[axis] for piece in pieces]
            bad = watch.first_overflow()
            if bad is None:
                return
            at += sum(counts[:bad])
        else:
            for piece in pieces:
                if watch.overflowed():
                    break
                yield piece
                at += piece.shape[axis]
                part.passed(at)
            else:
                return
            del piece  # free it before the other decode makes its plan
    _remember(vae, at, coded=coded)
    yield from wide(part.rest(at))


def _remember(vae: NarrowVAE, at: int, *, coded: bool) -> None:
    """Log the overflow in frame `at`, and let later decodes of `vae` begin without float16."""
    with _lock:
        is_first, vae.allow_fp16 = vae.allow_fp16, vae.allow_fp16 and coded
    if coded:
        log_once("values were out of the range of int8; such videos continue in 16 bits")
    elif is_first:
        _logger.warning(
            "Fast Video VAE: float16 overflowed in a decode; bfloat16 from frame %d on, and in "
            "later decodes of this VAE",
            at,
        )
    if not vae.graphs:  # a graph of another thread may read them
        vae.drop_derived()
