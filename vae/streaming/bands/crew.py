"""The devices of a VAE: which ones take part in a video, and how fast they are."""

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from ....kernels import is_out_of_memory, log_once

_logger = logging.getLogger(__name__)

_REASON_LENGTH = 120

# Work of one kind: whether it is an encode, and its dtype.
Kind = tuple[bool, torch.dtype]


class Crew:
    """The devices of a VAE, by their number in its list; a copied VAE starts without any.

    Attributes:
        devices: The devices; one that is named twice is two devices that share it.
        given: Their speeds in any unit, which are not measured then; None: measured.
    """

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] = ()
        self.given: tuple[float, ...] | None = None
        self._failed: set[int] = set()
        self._measured: dict[Kind, dict[int, float]] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Crew":
        return Crew()

    def __reduce__(self) -> tuple[type["Crew"], tuple[()]]:
        return Crew, ()

    def choose(self, devices: Sequence[torch.device]) -> None:
        """Use other `devices`; what is known of the ones before is forgotten."""
        self.devices, self.given = tuple(devices), None
        with self._lock:
            self._failed, self._measured = set(), {}

    def members(self, own: torch.device) -> dict[int, torch.device]:
        """Return the devices of a video by number.

        Args:
            own: Device of the weights.

        Returns:
            At least two devices, or none: one device computes the video then.
        """
        devices = {n: each for n, each in enumerate(self.devices) if n not in self._failed}
        if own not in self.devices:
            if self.devices:
                names = ", ".join(map(str, self.devices))
                log_once(f"the weights are on {own}, and devices are {names}; using {own} alone")
            return {}
        return devices if own in devices.values() and len(devices) > 1 else {}

    def speeds(self, kind: Kind) -> dict[int, float]:
        """Return the known speeds for a `kind` of work, by number."""
        if self.given is not None:
            return dict(enumerate(self.given))
        with self._lock:
            return dict(self._measured.get(kind, {}))

    def measured(self, kind: Kind, speeds: Mapping[int, float]) -> None:
        """Remember measured `speeds` for a `kind` of work."""
        with self._lock:
            self._measured.setdefault(kind, {}).update(speeds)

    def fail(self, number: int, device: torch.device, error: BaseException) -> None:
        """Leave a device out from here on, and log why, once.

        Args:
            number: Its number.
            device: The device.
            error: What happened there.
        """
        with self._lock:
            known = number in self._failed
            self._failed.add(number)
        if known:
            return
        text = " ".join(str(error).split())[:_REASON_LENGTH] or type(error).__name__
        reason = f"memory ran out ({text})" if is_out_of_memory(error) else text
        _logger.warning(
            "Fast Video VAE: %s failed, and the other devices do its work from here on: %s",
            device,
            reason,
        )
