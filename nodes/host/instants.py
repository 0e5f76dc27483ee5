"""Moments of the work, on the host's clock and, for a CUDA device, on the device's clock.

The seconds between two CUDA events on the current stream are device time: they include waiting for
the host, but not the work of the host while the device is busy.
"""

from time import perf_counter as clock
from typing import NamedTuple

import torch


class Instant(NamedTuple):
    """A moment in seconds of the host, and on a CUDA device an event on the current stream."""

    seconds: float
    event: torch.cuda.Event | None = None

    def until(self, last: "Instant", *, wait: bool) -> tuple[float, bool]:
        """Return the seconds to `last` and whether they are final; `wait` for a busy device."""
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
        except RuntimeError:  # events of two devices, or a failed device
            return host, True


def instant(device: torch.device | None = None) -> Instant:
    """Return the current moment, with an event on the current stream of a CUDA `device`."""
    event = None if device is None or device.type != "cuda" else record_event(device)
    return Instant(clock(), event)


# None: the stream is being captured, and the graph would include the event; or the device has
# failed, and the work on it reports that better.
def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream of a CUDA `device`, or return None."""
    try:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    except RuntimeError:
        return None
    return event
