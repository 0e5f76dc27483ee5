"""The devices of a VAE: which ones take part in a video, and what they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....kernels import Snapshot, is_out_of_memory, log_once
from ...models.replicas import Replicas
from ...planning.bands import BandPlanner
from ...planning.job import StreamJob
from ...planning.plan import Plan, plan_of
from ..options import StreamOptions
from ..output import Output
from ..precision import check_computes

_REASON_LENGTH = 120


class DeviceError(RuntimeError):
    """A device failed in a video that several share; the message is one line.

    Attributes:
        number: Its number in the list of the VAE.
    """

    def __init__(self, number: int, device: torch.device, error: Exception) -> None:
        text = " ".join(str(error).split())[:_REASON_LENGTH] or type(error).__name__
        reason = f"memory ran out ({text})" if is_out_of_memory(error) else text
        super().__init__(f"{device} failed: {reason}")
        self.number = number


class Team:
    """The devices that share the videos of a VAE, by their number in its list, and their copies.

    A running video keeps its team when others are chosen. A copied VAE starts without any device.
    """

    def __init__(self, replicas: Replicas, devices: Sequence[torch.device] = ()) -> None:
        self.replicas = replicas
        self.devices = tuple(devices)  # one that is named twice is two devices that share it
        self._failed: set[int] = set()

    def __reduce__(self) -> tuple[type["Team"], tuple[Replicas]]:
        return Team, (self.replicas,)

    def members(self, own: torch.device) -> dict[int, torch.device]:
        """Return two devices of a video or more, by number; or none: one computes it."""
        if self.devices and own not in self.devices:
            names = ", ".join(map(str, self.devices))
            log_once(f"the weights are on {own}, and devices are {names}; using {own} alone")
        left = self._left()
        return left if own in left.values() and len(left) > 1 else {}

    def plan(self, job: StreamJob, options: StreamOptions) -> Plan | None:
        """Return the plan of a stream in bands; None: one device computes it."""
        devices = self.members(job.device)
        if not devices:
            return None
        for device in devices.values():
            check_computes(job.dtype, device)
        first = next(number for number, device in devices.items() if device == job.device)
        limit, tile, chunk = options.limit_bytes, options.tile, options.chunk
        bands = BandPlanner(job, devices, first, limit, tile, chunk).plan()
        return None if bands is None else plan_of(job, bands)

    def fail(self, number: int) -> None:
        """Leave a device out of later videos, and free the copies there that no other one uses."""
        self._failed.add(number)
        device = self.devices[number]
        if device not in self._left().values():
            self.replicas.drop(device)

    def _left(self) -> dict[int, torch.device]:
        """Return the devices that have not failed, by number."""
        return {n: each for n, each in enumerate(self.devices) if n not in self._failed}


@dataclass(frozen=True)
class BandedWork:
    """What the devices of a video have in common."""

    job: StreamJob  # on the first device
    replicas: Replicas
    output: Output | None  # of a decoder's frames; None: an encode
    kernels: Callable[[torch.device], Snapshot]  # in addition to the library
