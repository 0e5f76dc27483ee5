"""The settings of the runs of a video: which one follows after a failure, and what is remembered.

float16 ends at 65504, where bfloat16 has the range of float32. Underflow is not looked for: below
6e-5 float16 has fewer bits than above. Weights of published VAEs are far larger, and norms keep the
activations near 1.
"""

import logging
import threading
from dataclasses import dataclass, replace

import torch

from ...kernels import Fallback, device_name, log_once
from ..planning.job import StreamJob
from ..planning.plan import Plan, smaller_plan
from ..validation import dtype_name
from ..weights import VAEWeights
from .precision import compute_dtype

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

# Threads can decode with one VAE.
_lock = threading.Lock()


class RangeError(ArithmeticError):
    """A piece of a decode has values that its dtype cannot hold; a wider one has to follow."""


@dataclass(frozen=True)
class Setting:
    """The conditions of a run."""

    device: torch.device  # of the layers, or the first one of several
    dtype: torch.dtype  # of the layers
    wide: torch.dtype  # the dtype after an overflow
    coded: frozenset[str] = frozenset()  # names of the convolutions in int8
    shared: bool = True  # the VAE's other devices take part
    plan: Plan | None = None  # None: the fastest one that fits
    moved: bool = False  # the VAE is on another device, whose memory has run out, or which is wrong
    is_last: bool = False  # memory ran out under this setting before, and there is no smaller plan
    # What serves in place of what the device computes wrongly.
    fallback: Fallback = Fallback()  # noqa: RUF009, it is frozen
    watched: bool = True  # frames that are not finite end the run
    distrusts: bool = False  # copies from the VAE's device may be wrong

    @property
    def is_narrow(self) -> bool:
        """Whether values can overflow that `widened` holds."""
        return bool(self.coded) or self.dtype != self.wide

    @property
    def is_open(self) -> bool:
        """Whether the VAE's other devices take part, if there are any."""
        return self.shared and self.plan is None

    @property
    def words(self) -> str:
        """What the video goes on with, for the log."""
        if self.moved:
            return "the CPU"
        return f"{self.device} alone" if self.plan is None else str(self.plan)

    def widened(self) -> "Setting":
        """Return the setting after an overflow."""
        return replace(self, dtype=self.wide, coded=frozenset(), plan=None, is_last=False)

    def instead(self, fallback: Fallback) -> "Setting":
        """Return the setting with a `fallback`, on the CPU if that is one."""
        if fallback.cpu and self.device != _CPU:
            return replace(self._on_cpu(), distrusts=True)
        if not fallback.names:
            return self
        wide = torch.float32 if fallback.float32 else self.wide
        dtype = torch.float32 if fallback.float32 else self.dtype
        both = self.fallback | fallback
        return replace(self, dtype=dtype, wide=wide, coded=frozenset(), fallback=both)

    def after_nan(self) -> "Setting":
        """Return the setting after frames that are not finite, though no value can overflow."""
        # In the reference on one device; if they are not finite there either, they are what the
        # weights give.
        if self.fallback.reference and self.dtype.itemsize >= 4 and not self.shared:
            return replace(self, watched=False)
        reference = Fallback(reference=True, float32=self.dtype.itemsize < 4)
        return replace(self.instead(reference).alone(), is_last=False)

    def alone(self) -> "Setting":
        """Return the setting on the VAE's own device, after a failure of several."""
        return replace(self, shared=False, plan=None)

    def smaller(
        self, job: StreamJob | None, plan: Plan | None, *, delivered: bool
    ) -> "Setting | None":
        """Return the setting after memory ran out under `plan`; None: there is none."""
        # Without a smaller plan the same one may succeed now; at last there is the CPU. A run that
        # `delivered` something may do so again.
        smaller = job and plan and smaller_plan(job, plan)
        if smaller:
            return replace(self, plan=smaller)
        if delivered or not self.is_last:
            return replace(self, plan=plan or self.plan, is_last=True)
        return None if self.device == _CPU else self._on_cpu()

    def _on_cpu(self) -> "Setting":
        dtype = compute_dtype(self.wide, _CPU)
        return Setting(_CPU, dtype, dtype, shared=False, moved=True, watched=self.watched)


def after_overflow(vae: VAEWeights, at: int, setting: Setting) -> Setting:
    """Return the setting after frame `at` was not finite, logged and remembered by the VAE."""
    if not setting.is_narrow:
        following = setting.after_nan()
        vae.is_finite = following.watched
        _report_nan(at, setting, following)
        return following
    coded = bool(setting.coded)
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
    return setting.widened()


def _report_nan(at: int, setting: Setting, following: Setting) -> None:
    device = device_name(setting.device)
    where = f"frame {at} is not finite in a decode on {device}, though its latent is"
    if following.watched:
        how = f"the reference ops in {dtype_name(following.dtype)} continue this video"
        # fp16 has a small range.
        how += "; please report it with `info --check`" * (setting.dtype != torch.float16)
    else:
        how = "nor with the reference ops; the weights of this VAE may be damaged"
    _logger.warning("Fast Video VAE: %s; %s", where, how)
