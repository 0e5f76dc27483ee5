"""The memory and the traffic of one steady step, from the footprints of its layers.

The step is walked as the executors run it: depth first, each part of an activation through all
layers that follow, and the parts joined before a layer that takes frames in pairs. Of equal parts
only the last one is followed, next to what those before it have left.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..layers.frame_runs import largest_part
from ..layers.row_bands import WORTH_IT
from .footprint import Footprint, Form

# Attention on a GPU in blocks: the head size above which blocks are used, the scores of a block,
# and the bytes of a score and its softmax (kernels/reference/attention.py).
_FUSED_HEAD = 256
_SCORES = 1 << 26
_SCORE_BYTES = 8

# Rows of a band, at least, with those around it.
_LEAST_ROWS = 3


class Spot(NamedTuple):
    """The frames at one place of a network: of the largest tile, and sums over all tiles."""

    height: int
    width: int
    pixels: float
    sides: float


class Level:
    """A layer on frames of one size, or the crop of a tile; bytes are those of a frame and fixed.

    Attributes:
        given: Bytes of a frame of its input.
        peak: As of the `Footprint`.
        result: As of the `Footprint`.
        scratch: As of the `Footprint`.
        moved: As of the `Footprint`, of all tiles.
        tails: Bytes of the tails of all tiles, and of the largest one.
    """

    def __init__(self, layer: Footprint, spot: Spot, batch: int, *, on_cpu: bool) -> None:
        pixels, sides = batch * spot.height * spot.width, batch * (spot.height + spot.width)

        def line(form: Form) -> tuple[float, float]:
            return form.at(pixels, sides)

        self.given = float(layer.entering * pixels)
        each, fixed = line(layer.peak)
        self.peak = each, fixed + line(layer.second)[1] + layer.copies * on_cpu
        self.result, self.scratch = line(layer.result), line(layer.scratch)
        self.largest = line(layer.largest)
        every = batch * spot.pixels, batch * spot.sides
        self.moved = layer.moved.at(*every)
        self.tails = layer.tails.at(*every)[1], line(layer.tails)[1]
        self.growth, self.times, self.replaces = layer.growth, layer.times, layer.replaces
        self.pairs, self.rows = layer.pairs, spot.height
        in_blocks = layer.head > _FUSED_HEAD and not on_cpu
        self.scores = pixels * spot.height * spot.width if in_blocks else 0
        self.banded, self.passes = layer.banded, layer.passes
        self.saves = layer.adds and not layer.replaces


class Crop(Level):
    """A crop to frames of a size, of a pixel with some bytes."""

    def __init__(self, entering: float, spot: Spot, batch: int) -> None:
        result = entering * batch * spot.height * spot.width
        self.given, self.peak, self.result = result, (result, 0.0), (result, 0.0)
        self.scratch = self.tails = self.largest = 0.0, 0.0
        self.moved = 2 * entering * batch * spot.pixels, 0.0
        self.growth, self.times, self.replaces = 1, 1, False
        self.pairs, self.rows, self.scores, self.banded, self.saves = False, 0, 0, False, False
        self.passes = 1


def levels_of(
    layers: Sequence[Footprint], spots: Sequence[Spot], batch: int, *, on_cpu: bool, crops: bool
) -> list[list[Level]]:
    """Return the levels of some layers, cut before each one that takes frames in pairs.

    Args:
        layers: Their footprints.
        spots: The frames before each layer and after the last one.
        batch: Videos.
        on_cpu: They run on a CPU.
        crops: They run in tiles: frames are cut out before the first layer, and cut off where a
            layer changes their size.
    """
    chains: list[list[Level]] = [[]]
    for index, layer in enumerate(layers):
        spot, after = spots[index : index + 2]
        if crops and not index:
            chains[0].append(Crop(layer.entering, spot, batch))
        if layer.pairs and chains[-1]:
            chains.append([])
        level = Level(layer, spot, batch, on_cpu=on_cpu)
        chains[-1].append(level)
        large = int(spot.height * layer.scale), int(spot.width * layer.scale)
        if crops and large != after[:2]:
            pixel = sum(level.result) / (batch * large[0] * large[1]) / layer.times
            chains[-1].append(Crop(pixel, after, batch))
    return chains


class Runs(NamedTuple):
    """The runs of an iterator: bytes and frames of each one, and their number."""

    nbytes: float
    frames: int
    count: int = 1


class Step:
    """A walk through one step, in parts of some bytes, next to what is kept.

    Attributes:
        moved: Bytes that are read and written.
        passes: Kernels that are launched.
        largest: Bytes of the largest tensor.
    """

    def __init__(self, part_bytes: int, batch: int, *, steady: bool) -> None:
        self.moved = self.largest = self._scratch = 0.0
        self.passes = 0
        self._part_bytes, self._copies, self._steady = part_bytes, batch > 1, steady
        self._live = self._growing = 0.0

    @property
    def peak(self) -> float:
        """The most bytes at once: in a steady step next to the scratch memory of all layers."""
        return self._live + self._scratch if self._steady else self._growing

    def top(self, nbytes: float) -> None:
        """Note bytes that are allocated at once, besides scratch memory."""
        self._live = max(self._live, nbytes)
        self._growing = max(self._growing, nbytes + self._scratch)

    def through(
        self,
        chains: Sequence[Sequence[Level]],
        x: Runs,
        live: float,
        *,
        keeps: bool = False,
        repeats: int = 1,
    ) -> Runs:
        """Walk `Executor.advance` for a chunk `x`, which is `live`; `keeps`: its runs are kept."""
        runs, base = x, live
        for number, levels in enumerate(chains):
            whole = Runs(runs.nbytes * runs.count, runs.frames * runs.count)
            if runs.count > 1:
                self.top(live + 2 * whole.nbytes)
                self.moved += 2 * whole.nbytes * repeats
            if number:
                live = base + whole.nbytes
            stays = keeps or number + 1 < len(chains)
            runs = self._chain(
                levels,
                0,
                whole,
                live,
                stays=stays,
                ready=number > 0 or levels[0].pairs,
                repeats=repeats,
            )
        return runs

    def _chain(
        self,
        levels: Sequence[Level],
        at: int,
        x: Runs,
        live: float,
        *,
        stays: bool,
        ready: bool = False,
        owned: bool = False,
        repeats: int = 1,
    ) -> Runs:
        """Walk the layers from one on; `x` is `live`, and freed behind the first if `owned`."""
        nbytes, frames = x.nbytes, x.frames
        for index in range(at, len(levels)):
            level = levels[index]
            part = frames
            if not (ready and index == at):
                part = largest_part(frames, int(nbytes * level.growth), self._part_bytes)
            if part < frames:
                count, small = frames // part, Runs(nbytes * part / frames, part)
                live += small.nbytes * self._copies
                if stays:
                    live += (count - 1) * leaving(levels[index:], part)
                runs = self._chain(
                    levels, index, small, live, stays=stays, ready=True,
                    owned=self._copies, repeats=repeats * count,
                )  # fmt: skip
                return Runs(runs.nbytes, runs.frames, runs.count * count)
            result = level.result[0] * frames + level.result[1]
            self._call(level, frames, live, result, repeats)
            if not level.replaces:
                live += result - nbytes * owned
                owned = True
            nbytes, frames = result, int(frames * level.times)
        return Runs(nbytes, frames)

    def _call(self, level: Level, frames: int, live: float, result: float, repeats: int) -> None:
        """Run one layer."""
        lines = level.peak, level.scratch, level.moved
        peak, scratch, moved = (line[0] * frames + line[1] for line in lines)
        if level.banded and scratch > WORTH_IT * self._part_bytes:
            # The result of a band is not in the memory of all rows. Its input has two rows more,
            # and the norm reads whole frames before.
            band = max(self._part_bytes, scratch / level.rows * _LEAST_ROWS)
            moved += scratch + 2 * result + 4 * scratch / level.rows * scratch / band
            # The last convolution, which adds a residual, can read less than the first one.
            last = scratch * min(1.0, result / (level.given * frames))
            whole = last <= WORTH_IT * self._part_bytes
            peak += self._part_bytes - result * (level.saves and not whole)
            scratch = max(band, last) if whole else band
        self.moved += moved * repeats
        self.passes += level.passes * repeats
        if level.scores:
            peak += _SCORE_BYTES * min(level.scores * frames, _SCORES)
        self._scratch = max(self._scratch, scratch)
        largest = level.largest[0] * frames + level.largest[1]
        self.largest = max(self.largest, result, scratch, largest, level.given * frames)
        self.top(live + peak)


def leaving(levels: Iterable[Level], frames: int) -> float:
    """Return the bytes of the result of the last level for some frames of the first one."""
    result = 0.0
    for level in levels:
        result = level.result[0] * frames + level.result[1]
        frames = int(frames * level.times)
    return result
