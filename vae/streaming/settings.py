"""The settings of a run, of which the next one is taken after a failure."""

from dataclasses import dataclass, replace

import torch

from ...kernels import Fallback
from ..planning.job import StreamJob
from ..planning.plan import Plan, smaller_plan
from .precision import compute_dtype

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """The conditions of a run.

    Attributes:
        device: The device of the layers, or the first one of several.
        dtype: Dtype of the layers.
        wide: The dtype after an overflow.
        coded: Names of the convolutions in int8.
        shared: The VAE's other devices take part.
        plan: The plan; None: the fastest one that fits.
        moved: The VAE is on another device, whose memory has run out, or which is wrong.
        is_last: Memory ran out under this setting before, and there is no smaller plan.
        fallback: What serves in place of what the device computes wrongly.
        watched: Frames that are not finite end the run.
        distrusts: Copies from the VAE's device may be wrong.
    """

    device: torch.device
    dtype: torch.dtype
    wide: torch.dtype
    coded: frozenset[str] = frozenset()
    shared: bool = True
    plan: Plan | None = None
    moved: bool = False
    is_last: bool = False
    fallback: Fallback = Fallback()  # noqa: RUF009, it is frozen
    watched: bool = True
    distrusts: bool = False

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
        """Return the setting after memory ran out under `plan`; None: there is none.

        A smaller plan follows; where there is none, the same one, which may succeed now; at last
        the CPU. A run that `delivered` something may do so again.
        """
        smaller = job and plan and smaller_plan(job, plan)
        if smaller:
            return replace(self, plan=smaller)
        if delivered or not self.is_last:
            return replace(self, plan=plan or self.plan, is_last=True)
        return None if self.device == _CPU else self._on_cpu()

    def _on_cpu(self) -> "Setting":
        dtype = compute_dtype(self.wide, _CPU)
        return Setting(_CPU, dtype, dtype, shared=False, moved=True, watched=self.watched)
