"""Bands that fit the speeds of the devices, which the first chunks of a video show."""

from collections import defaultdict
from collections.abc import Mapping

from ...planning.bands import BandPlanner, Bands
from .crew import Crew, Kind

# Chunks without a measurement (libraries set up their work), then those of a measurement.
_SETTING_UP = 1
_MEASURED = 2

# Other bands are cut if they save this part of the time. All tails are moved for it.
_WORTH_IT = 0.05
_MOST_CUTS = 2

# Shorter measurements show the noise of the machine.
_LEAST_S = 0.05


class Balance:
    """Measures the devices of one video, and decides about other bands.

    Args:
        crew: Remembers the speeds for later videos.
        kind: Kind of work.
    """

    def __init__(self, crew: Crew, kind: Kind) -> None:
        self._crew, self._kind = crew, kind
        self._seconds: dict[int, float] = defaultdict(float)
        self._chunks = self._cuts = 0
        self._done = crew.given is not None

    def restart(self) -> None:
        """Measure from the next chunk on, because the bands have changed."""
        self._seconds.clear()
        self._chunks = 0

    def note(
        self, planner: BandPlanner, bands: Bands, seconds: Mapping[int, float]
    ) -> Bands | None:
        """Count a chunk.

        Args:
            planner: Plans the bands.
            bands: The bands of the chunk.
            seconds: Seconds of the chunk by number of the device.

        Returns:
            Better bands for the next chunks, or None.
        """
        if self._done:
            return None
        self._chunks += 1
        if self._chunks > _SETTING_UP:
            for number, each in seconds.items():
                self._seconds[number] += each
        if self._chunks < _SETTING_UP + _MEASURED:
            return None
        if min(self._seconds.values()) < _LEAST_S:
            return None
        speeds = {
            number: work / self._seconds[number] for number, work in planner.works(bands).items()
        }
        self._crew.measured(self._kind, speeds)
        self._cuts += 1
        better = planner.recut(bands, self._crew.speeds(self._kind))
        gain = 1 - planner.seconds(better, speeds) / planner.seconds(bands, speeds)
        self._done = gain < _WORTH_IT or self._cuts > _MOST_CUTS
        self.restart()
        return None if self._done else better
