"""The division of frames into bands that devices of different speeds finish at the same time."""

import functools
import itertools
from collections.abc import Mapping

from ..models.receptive_field import Span
from .job import StreamJob
from .layer_specs import lengths_before

# Halvings of the interval of the longest time of a band; the last one is 0.02 % of it.
_STEPS = 12


class Division:
    """A cut, and rows (0) or columns (1); with the work of each band."""

    def __init__(self, job: StreamJob, cut: int, axis: int) -> None:
        self.cut, self.axis = cut, axis
        spec, single_frame = job.spec, job.single_frame
        shapes = spec.shapes(job.start, single_frame=single_frame)
        layers = spec.layers[:cut] if spec.encodes else spec.layers[cut:]
        first = 0 if spec.encodes else cut
        works = [
            layer.work(shape, single_frame=single_frame)
            for layer, shape in zip(spec.layers, shapes, strict=False)
        ]
        tiled = works[first : first + len(layers)]
        self.whole = job.latent_size[0] * (sum(works) - sum(tiled))
        self._encodes, self._layers = spec.encodes, layers
        self._length = (job.end if spec.encodes else shapes[cut][2:])[axis]
        whole = lengths_before(layers, self._length, (0, shapes[first + len(layers)][2:][axis]))
        self._per_pixel = [
            job.latent_size[0] * work / length
            for work, length in zip(tiled, whole[:-1], strict=True)
        ]
        self.length = whole[-1]
        # Bands begin at pixels of the frames before the tiled layers, which need no halo there.
        self.unit = 1 if spec.encodes else max(1, self.length // self._length)
        self.work = functools.cache(self._work)

    def _work(self, start: int, stop: int) -> float:
        """Return the products per latent of a band from `start` to `stop`, with its halo."""
        lengths = lengths_before(self._layers, self._length, (start, stop))
        own = sum(map(float.__mul__, self._per_pixel, map(float, lengths)))
        return own if self._encodes else own + self.whole

    def seconds(self, spans: Mapping[int, Span], speeds: Mapping[int, float], first: int) -> float:
        """Return the seconds per latent of the slowest device, and of joining in an encode."""
        slowest = max(self.work(*span) / speeds[number] for number, span in spans.items())
        return slowest + (self.whole / speeds[first] if self._encodes else 0.0)

    def even(self, speeds: Mapping[int, float]) -> dict[int, Span]:
        """Return bands in proportion to `speeds`, whose halos are not considered."""
        edges, total = [0], sum(speeds.values())
        for part in itertools.accumulate(speeds.values()):
            edges.append(round(self.length // self.unit * part / total) * self.unit)
        pairs = zip(speeds, itertools.pairwise(edges), strict=True)
        return {number: span for number, span in pairs if span[0] < span[1]}

    def balanced(self, speeds: Mapping[int, float], first: int) -> dict[int, Span]:
        """Return the bands whose slowest device is as fast as possible, without slow devices."""
        best = {first: (0, self.length)}
        low, high = 0.0, self.work(0, self.length) / speeds[first]
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found = self._within(middle, speeds, first)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _within(
        self, seconds: float, speeds: Mapping[int, float], first: int
    ) -> dict[int, Span] | None:
        """Return bands of at most `seconds` each, or None if they do not cover the frames."""
        spans: dict[int, Span] = {}
        at = 0
        for number, speed in speeds.items():
            left = (self.length - at) // self.unit
            if not left:
                break
            few, most = 0, left
            while few < most:
                middle = (few + most + 1) // 2
                if self.work(at, at + middle * self.unit) / speed <= seconds:
                    few = middle
                else:
                    most = middle - 1
            if few:
                spans[number] = at, at + few * self.unit
                at += few * self.unit
        return spans if at == self.length and first in spans else None
