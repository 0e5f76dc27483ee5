"""Bands that fit the speeds of the devices, which the first chunks of a video show."""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from ...planning.bands import BandPlanner, Bands
from .crew import Crew, Kind

# Chunks of a measurement. The first of a shape is none of them: kernels are compiled and tried.
_MEASURED = 2

# Other bands are cut if they save this part of the time. All tails are moved for it.
_WORTH_IT = 0.05
_MOST_CUTS = 2

# Shorter measurements show the noise of the machine.
_LEAST_S = 0.05


class Balance:
    """Measures the devices of one video for a `crew`, and decides about other bands."""

    def __init__(self, crew: Crew, kind: Kind) -> None:
        self._crew, self._kind = crew, kind
        self._seconds: dict[int, float] = defaultdict(float)
        self._set_up: set[Hashable] = set()
        self._chunks = self._cuts = 0
        self._done = False

    def restart(self) -> None:
        """Measure from the next chunk on, because the bands have changed."""
        self._seconds.clear()
        self._set_up.clear()
        self._chunks = 0

    def note(
        self, planner: BandPlanner, bands: Bands, seconds: Mapping[int, float], shape: Hashable
    ) -> Bands | None:
        """Count a chunk of a `shape` with its seconds by device; return better bands, or None."""
        if self._done:
            return None
        if shape not in self._set_up:
            self._set_up.add(shape)
            return None
        self._chunks += 1
        for number, each in seconds.items():
            self._seconds[number] += each
        if self._chunks < _MEASURED:
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
