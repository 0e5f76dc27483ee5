"""The devices of a VAE, as its attributes."""

from collections.abc import Sequence

import torch

from ...models.config import SEEDVR2, VAEConfig
from ...validation import checked_devices
from .crew import Team


class SharedDevices:
    """The part of a VAE that says which devices share its videos."""

    config: VAEConfig
    team: Team

    @property
    def devices(self) -> list[torch.device]:
        """The devices that share each video; empty: the VAE's own.

        Set a list of names such as "cuda:1" or of devices, the VAE's own among them, where results
        stay. Each gets a band of the frames, and the values are those of one device. The bits are
        the same too where kernels sum in the same order for a band and for whole frames; libraries
        can choose another order by size and by the number of cores. A device that is named twice
        counts as two. Devices of one type are taken to be equally fast.

        If a device fails, the video goes on from the next frame with the VAE's own device alone.
        Later videos leave the failed one out until the list is set again. After a failure of the
        VAE's own the error is raised if the device alone fails, too.
        """
        return list(self.team.devices)

    @devices.setter
    def devices(self, devices: Sequence[torch.device | str]) -> None:
        """Set `devices`; a `ValueError` for an unknown one, or a VAE without exact bands."""
        known = checked_devices(devices)
        if len(known) > 1 and self.config.family == SEEDVR2:
            raise ValueError(
                f"devices are {', '.join(map(str, known))}, but the group norms of SeedVR2 measure "
                "whole frames, so bands are not exact; expected one device, or `VideoVAE.shard`"
            )
        self.team = Team(self.team.replicas, known)
        for device in self.team.replicas.devices() - set(known):
            self.team.replicas.drop(device)
