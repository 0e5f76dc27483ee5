"""What the devices of a video have in common."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....kernels import Snapshot
from ...layers.oom import Relief
from ...planning.bands import BandPlanner
from ..output import Output
from .crew import Kind, Team


@dataclass(frozen=True)
class BandedWork:
    """What the devices of a video have in common."""

    planner: BandPlanner
    team: Team
    relief: Relief  # of the first device outside of its band
    release: Callable[[torch.device], None] | None  # releases memory of the caller
    known: bool  # the whole video is at hand, so a chunk can be taken from it again
    output: Output | None  # of a decoder's frames; None: an encode
    kernels: Callable[[torch.device], Snapshot]  # in addition to the library

    @property
    def kind(self) -> Kind:
        """The kind of work, for the speeds of the devices."""
        return self.planner.job.spec.encodes, self.planner.job.dtype
