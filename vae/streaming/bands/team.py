"""The devices that share the videos of a VAE."""

from collections import Counter
from collections.abc import Sequence

import torch

from ....kernels import log_once
from ...models.replicas import Replicas
from ...planning.bands import Place
from ...planning.device_memory import free_bytes
from ...planning.job import StreamJob
from ...planning.plan import Plan, make_bands, plan_of
from ...planning.tiling import band_cuts
from ...validation import checked_devices, checked_shares
from ..options import StreamOptions
from ..precision import check_computes
from .ranks import Rank, place_of

# A device of this process, or of another one.
Device = torch.device | Rank

# Numbers in the order of the devices, "memory": in proportion to what is free; None: equal ones.
Shares = Sequence[float] | str | None


class Team:
    """The devices that share the videos of a VAE, by their number in its list, and their copies.

    A running video keeps its team when others are chosen. A copied VAE starts without any device.
    """

    def __init__(
        self, replicas: Replicas, devices: Sequence[Device] = (), shares: Shares = None
    ) -> None:
        self.replicas, self.all, self.shares = replicas, tuple(devices), shares
        self._failed: set[int] = set()

    def __reduce__(self) -> tuple[type["Team"], tuple[Replicas]]:
        return Team, (self.replicas,)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this process."""
        return [each for each in self.all if isinstance(each, torch.device)]

    def members(self, own: torch.device) -> dict[int, Device]:
        """Return two devices of a video or more, by number; or none: `own` computes it alone."""
        if self.all and own not in self.devices:
            names = ", ".join(map(str, self.devices))
            log_once(f"the weights are on {own}, and devices are {names}; using {own} alone")
        left = {n: each for n, each in enumerate(self.all) if n not in self._failed}
        return left if own in left.values() and len(left) > 1 else {}

    def plan(self, job: StreamJob, options: StreamOptions) -> Plan | None:
        """Return the plan of a stream in bands; None: one device computes it."""
        members = self.members(job.device)
        if not members:
            return None
        if not band_cuts(job.network):
            log_once(f"{job.device} computes each video alone: the norms of SeedVR2 see all of it")
            return None
        where = [x.place if isinstance(x, Rank) else place_of(x) for x in members.values()]
        sharers, places = Counter(where), dict[int, Place]()
        for (number, each), memory in zip(members.items(), where, strict=True):
            device = each.device if isinstance(each, Rank) else each
            if isinstance(each, torch.device):
                check_computes(job.dtype, each)
            limit = options.limit_bytes
            if limit is None:
                free = each.free_bytes() if isinstance(each, Rank) else free_bytes(each)
                limit = int(free * job.shares[0])
            limit = max(1, limit // sharers[memory])
            share = float(limit) if self.shares else 1.0
            if self.shares and not isinstance(self.shares, str):
                share = self.shares[number]
            places[number] = Place(str(each), device, share, limit)
        first = next(number for number, each in members.items() if each == job.device)
        bands = make_bands(job, places, first, options.tile, options.chunk)
        return None if bands is None else plan_of(job, bands)

    def fail(self, number: int) -> None:
        """Leave a device out of later videos, and free the copies there that no other one uses."""
        self._failed.add(number)
        device, left = self.all[number], set(range(len(self.all))) - self._failed
        if isinstance(device, torch.device) and device not in [self.all[n] for n in left]:
            self.replicas.drop(device)


class SharedDevices:
    """The part of a VAE that says which devices share its videos."""

    team: Team

    @property
    def devices(self) -> list[torch.device]:
        """The devices that share each video; empty: the VAE's own.

        Set a list of names such as "cuda:1" or of devices, the VAE's own among them, where results
        stay. Each gets a band of the frames, and the values are those of one device. The bits are
        the same too where kernels sum in the same order for a band and for whole frames; libraries
        can choose another order by size and by the number of cores. A device that is named twice
        counts as two. Videos of SeedVR2, whose norms see whole frames, stay on the VAE's own.

        If a device fails, the video goes on from the next frame without it, or on the VAE's own
        alone if that has failed. Later videos leave another one out until the list is set again.
        """
        return self.team.devices

    @devices.setter
    def devices(self, devices: Sequence[torch.device | str]) -> None:
        """Set `devices` with equal shares; a `ValueError` for an unknown one."""
        known = checked_devices(devices)
        self.team = Team(self.team.replicas, known)
        for device in self.team.replicas.devices() - set(known):
            self.team.replicas.drop(device)

    @property
    def shares(self) -> Shares:
        """The shares of the work of `devices`; None: equal ones.

        Set numbers in the order of `devices`, such as `[2, 1]`, or "memory": in proportion to the
        free memory of each. A device whose share is too small for a band has none.
        """
        return self.team.shares

    @shares.setter
    def shares(self, shares: Shares) -> None:
        """Set `shares`, or raise a `ValueError` of one line."""
        checked = checked_shares(shares, len(self.team.all))
        self.team = Team(self.team.replicas, self.team.all, checked)
