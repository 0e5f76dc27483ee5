"""The devices of a VAE: which ones take part in a video, how fast they are, and what they share."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ....kernels import Snapshot, is_out_of_memory, log_once
from ...layers.oom import Relief
from ...models.replicas import Replicas
from ...planning.bands import BandPlanner
from ...planning.job import StreamJob
from ...planning.plan import Plan, plan_of
from ..options import StreamOptions
from ..output import Output
from ..precision import check_computes

_logger = logging.getLogger(__name__)

_REASON_LENGTH = 120

# Work of one kind: whether it is an encode, and its dtype.
Kind = tuple[bool, torch.dtype]


@dataclass
class _Choice:
    """A list of devices, and what is known of them."""

    devices: tuple[torch.device, ...] = ()
    failed: set[int] = field(default_factory=set)  # numbers of devices
    measured: dict[Kind, dict[int, float]] = field(default_factory=dict)


class Crew:
    """The devices of a VAE, by their number in its list; a copied VAE starts without any."""

    def __init__(self) -> None:
        self._choice = _Choice()
        self._lock = threading.Lock()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices; one that is named twice is two devices that share it."""
        return self._choice.devices

    def of_video(self) -> "Crew":
        """Return the devices of a video, which stay when others are chosen for later ones."""
        kept = Crew()
        kept._choice, kept._lock = self._choice, self._lock
        return kept

    def __deepcopy__(self, memo: object) -> "Crew":
        return Crew()

    def __reduce__(self) -> tuple[type["Crew"], tuple[()]]:
        return Crew, ()

    def choose(self, devices: Sequence[torch.device]) -> None:
        """Use other `devices` in later videos; what is known of the ones before is forgotten."""
        self._choice = _Choice(tuple(devices))

    def members(self, own: torch.device) -> dict[int, torch.device]:
        """Return two devices of a video or more, by number; or none: one computes it."""
        choice = self._choice
        devices = {n: each for n, each in enumerate(choice.devices) if n not in choice.failed}
        if own not in choice.devices:
            if choice.devices:
                names = ", ".join(map(str, choice.devices))
                log_once(f"the weights are on {own}, and devices are {names}; using {own} alone")
            return {}
        return devices if own in devices.values() and len(devices) > 1 else {}

    def speeds(self, kind: Kind) -> dict[int, float]:
        """Return the known speeds for a `kind` of work, by number."""
        with self._lock:
            return dict(self._choice.measured.get(kind, {}))

    def measured(self, kind: Kind, speeds: Mapping[int, float]) -> None:
        """Remember measured `speeds` for a `kind` of work."""
        with self._lock:
            self._choice.measured.setdefault(kind, {}).update(speeds)

    def fail(self, number: int, device: torch.device, error: BaseException) -> None:
        """Leave a device out from here on, and log why, once."""
        with self._lock:
            known = number in self._choice.failed
            self._choice.failed.add(number)
        if known:
            return
        text = " ".join(str(error).split())[:_REASON_LENGTH] or type(error).__name__
        reason = f"memory ran out ({text})" if is_out_of_memory(error) else text
        _logger.warning(
            "Fast Video VAE: %s failed, and the other devices do its work from here on: %s",
            device,
            reason,
        )


@dataclass(frozen=True)
class Team:
    """The devices that can share a video, and copies of the networks there."""

    replicas: Replicas
    crew: Crew = field(default_factory=Crew)

    def of_video(self) -> "Team":
        """Return the team of a video, whose devices stay when others are chosen."""
        return Team(self.replicas, self.crew.of_video())

    def plan(self, job: StreamJob, options: StreamOptions) -> tuple[Plan, BandPlanner] | None:
        """Return the plan of a stream in bands and their planner; None: one device computes it."""
        devices = self.crew.members(job.device)
        if not devices:
            return None
        for device in devices.values():
            check_computes(job.dtype, device)
        first = next(number for number, device in devices.items() if device == job.device)
        limit, tile, chunk = options.limit_bytes, options.tile, options.chunk
        planner = BandPlanner(job, devices, first, limit, tile, chunk)
        bands = planner.plan(self.crew.speeds((job.spec.encodes, job.dtype)))
        return None if bands is None else (plan_of(job, bands), planner)


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
