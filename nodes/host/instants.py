"""Moments of the work, by the clock of the host and, on a CUDA device, by that of the device.

Between two CUDA events that were recorded on the current stream the seconds are those of the
device: a device that waits for the host is counted, work of the host beside a busy device is not.
"""

from time import perf_counter as clock
from typing import NamedTuple

import torch


class Instant(NamedTuple):
    """A moment; made by `instant`.

    Attributes:
        seconds: On the host's clock, which is that of `time.perf_counter`.
        event: Recorded on the current stream of a CUDA device; None: there is no such device.
    """

    seconds: float
    event: torch.cuda.Event | None = None

    def until(self, last: "Instant", *, wait: bool) -> tuple[float, bool]:
        """Seconds from here to another moment, and whether they are right.

        They are the host's, and not right, while the device is at work and nobody is to `wait`.
        """
        host = max(0.0, last.seconds - self.seconds)
        if self.event is None or last.event is None:
            return host, True
        try:
            for event in (self.event, last.event):
                if wait:
                    event.synchronize()
                elif not event.query():
                    return host, False
            return self.event.elapsed_time(last.event) / 1e3, True
        except RuntimeError:  # they are of two devices, or the device has failed
            return host, True


def instant(device: torch.device | None = None) -> Instant:
    """This moment, with an event on the current stream where the work is done on a CUDA device."""
    event = None if device is None or device.type != "cuda" else record_event(device)
    return Instant(clock(), event)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event on the current stream of a CUDA device.

    None: the stream is being captured, and the graph would take the event up; or the device has
    failed, which whoever works on it tells better.
    """
    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    except RuntimeError:
        return None
    return event
