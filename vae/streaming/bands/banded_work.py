"""What the devices of a video have in common."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....kernels import Snapshot
from ...layers.oom import Relief
from ...models.replicas import Replicas
from ...planning.bands import BandPlanner
from ..output import Output
from .crew import Crew, Kind


@dataclass(frozen=True)
class BandedWork:
    """What the devices of a video have in common.

    Attributes:
        planner: Plans the bands.
        crew: The devices of the VAE.
        replicas: The copies of its networks.
        relief: Frees memory of the first device outside of its band.
        release: Releases memory of the caller on a device; None: nothing.
        known: The whole video is at hand, so a chunk can be taken from it again.
        output: Destination of a decoder's frames; None: the video is encoded.
        kernels: Returns what a device may run in addition to the library.
    """

    planner: BandPlanner
    crew: Crew
    replicas: Replicas
    relief: Relief
    release: Callable[[torch.device], None] | None
    known: bool
    output: Output | None
    kernels: Callable[[torch.device], Snapshot]

    @property
    def kind(self) -> Kind:
        """The kind of work, for the speeds of the devices."""
        return self.planner.job.spec.encodes, self.planner.job.dtype
