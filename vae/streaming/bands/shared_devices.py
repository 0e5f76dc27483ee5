"""The devices of a VAE, as its attributes."""

from collections.abc import Sequence
from math import inf

import torch

from ...models.config import SEEDVR2, VAEConfig
from ...validation import checked_devices
from ..executors import Team


class SharedDevices:
    """The part of a VAE that says which devices share its videos.

    Attributes:
        config: Configuration of the VAE.
        team: The devices, and copies of the weights.
    """

    config: VAEConfig
    team: Team

    @property
    def devices(self) -> list[torch.device]:
        """The devices that share each video; empty: the VAE's own.

        Set a list of names such as "cuda:1" or of devices, the VAE's own among them, where results
        stay. Each gets a band of the frames, and the values are those of one device. The bits are
        the same too where kernels sum in the same order for a band and for whole frames; libraries
        can choose another order by size and by the number of cores. A device that is named twice
        counts as two. Another device than the VAE's that fails is left out until the list is set
        again; a failure of the VAE's own ends the video.
        """
        return list(self.team.crew.devices)

    @devices.setter
    def devices(self, devices: Sequence[torch.device | str]) -> None:
        """Set the devices.

        Args:
            devices: Names or devices.

        Raises:
            ValueError: A device is unknown, or the VAE cannot be divided exactly.
        """
        known = checked_devices(devices)
        if len(known) > 1 and self.config.family == SEEDVR2:
            raise ValueError(
                f"devices are {', '.join(map(str, known))}, but the group norms of SeedVR2 measure "
                "whole frames, so bands are not exact; expected one device, or `VideoVAE.shard`"
            )
        self.team.crew.choose(known)
        for device in self.team.replicas.devices() - set(known):
            self.team.replicas.drop(device)

    @property
    def device_speeds(self) -> list[float] | None:
        """The speeds of `devices`, in any unit; None: measured in the first chunks of videos."""
        given = self.team.crew.given
        return None if given is None else list(given)

    @device_speeds.setter
    def device_speeds(self, speeds: Sequence[float] | None) -> None:
        """Set the speeds.

        Args:
            speeds: One per device; None: they are measured, and remembered.

        Raises:
            ValueError: Their number is not that of the devices, or one is not positive.
        """
        count = len(self.devices)
        known = None if speeds is None else [float(speed) for speed in speeds]
        right = known is None or (len(known) == count and all(0 < each < inf for each in known))
        if not right:
            raise ValueError(f"device_speeds is {speeds!r}; expected {count} positive numbers")
        self.team.crew.given = None if known is None else tuple(known)
