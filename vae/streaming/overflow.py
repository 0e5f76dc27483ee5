"""Decodes in float16 or int8 that overflow, which one sum per piece shows.

float16 ends at 65504, where bfloat16 has the range of float32. What overflows becomes infinite, and
the next norm makes it NaN: nothing in the networks turns that into a finite number again. So a
finite piece proves that nothing overflowed in it.

Underflow is not looked for: below 6e-5 float16 has fewer bits than above. Weights of published VAEs
are far larger, and norms keep the activations near 1.
"""

import logging
import math
import threading
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import device_name, log_once
from ..layers.inputs.coding import Coding
from ..validation import dtype_name
from .options import StreamOptions
from .settings import Setting

_logger = logging.getLogger(__name__)

# Threads can decode with one VAE.
_lock = threading.Lock()


class RangeError(ArithmeticError):
    """A piece of a decode has values that its dtype cannot hold; a wider one has to follow."""


class Finding:
    """The examination of one piece, in parts and from threads of several devices."""

    def __init__(
        self, sides: dict[torch.device, torch.cuda.Stream], coding: Coding | None = None
    ) -> None:
        self._sides, self._coding = sides, coding
        # By thread, which has one device: the sum, and the event after it.
        self._sums: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    def look(self, x: Tensor, coding: Coding | None = None) -> None:
        """Examine a part `[B, C, n, H, W]` of the piece, without a wait for the device.

        `coding` has made it; None: that of the run.
        """
        total = x.sum(dtype=torch.float32)  # finite for less than 5e33 finite ones in float16
        coding = coding or self._coding
        if coding is not None:
            total.add_(coding.verdict())
        thread = threading.get_ident()
        if thread in self._sums:
            before, summed = self._sums[thread]
            total.add_(before)
        else:
            summed = torch.cuda.Event() if x.device.type == "cuda" else None
        if summed is not None:
            summed.record(torch.cuda.current_stream(x.device))
        self._sums[thread] = total, summed

    def overflowed(self) -> bool:
        """Wait for the work on the piece, and return whether it has NaN or infinity."""
        return not all(math.isfinite(self._read(*each)) for each in self._sums.values())

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
    """Examines the pieces of one run for NaN and infinity, and for values out of int8."""

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._findings: deque[Finding] = deque()

    def next_piece(self) -> Finding:
        """Return the examination of the next piece."""
        self._findings.append(Finding(self._sides, self._coding))
        return self._findings[-1]

    def overflowed(self) -> bool:
        """Return whether the piece after the one of the last call has NaN or infinity."""
        return self._findings.popleft().overflowed()


class NarrowVAE(Protocol):
    """What this module needs of a `VideoVAE`; see there."""

    allow_fp16: bool
    graphs: bool

    def proved(self, setting: Setting) -> Setting:
        """Return the setting without what its device computes wrongly."""
        ...

    def drop_derived(self) -> None:
        """Free the weights in other dtypes and layouts."""


def allows_fp16(vae: NarrowVAE, options: StreamOptions) -> bool:
    """Return whether a decode may compute in float16: no dtype is chosen, and none overflowed."""
    return vae.allow_fp16 and options.dtype is None


def report_nan(at: int, setting: Setting, following: Setting) -> None:
    """Log how a decode goes on after a frame `at` that is not finite, though no dtype is narrow."""
    device = device_name(setting.device)
    where = f"frame {at} is not finite in a decode on {device}, though its latent is"
    if following.watched:
        how = f"the reference ops in {dtype_name(following.dtype)} continue this video"
        # fp16 has a small range.
        how += "; please report it with `info --check`" * (setting.dtype != torch.float16)
    else:
        how = "nor with the reference ops; the weights of this VAE may be damaged"
    _logger.warning("Fast Video VAE: %s; %s", where, how)


def remember(vae: NarrowVAE, at: int, *, coded: bool) -> None:
    """Log the overflow in frame `at`, and let later decodes of `vae` begin without float16."""
    with _lock:
        is_first, vae.allow_fp16 = vae.allow_fp16, vae.allow_fp16 and coded
    if coded:
        log_once(f"values were out of the range of int8 in a decode; 16 bits from frame {at} on")
    elif is_first:
        _logger.warning(
            "Fast Video VAE: float16 overflowed in a decode; bfloat16 from frame %d on, and in "
            "later decodes of this VAE",
            at,
        )
    if not vae.graphs:  # a graph of another thread may read them
        vae.drop_derived()
