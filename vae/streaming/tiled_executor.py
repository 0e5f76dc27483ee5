"""The executor that runs some layers on whole frames and the others tile by tile."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from ...kernels import new_video
from ..layers.inputs.coding import Coding
from ..layers.temporal_cache import TemporalCache
from ..models.executor import Executor
from ..models.receptive_field import Size, Span, causal_taps, frame_sizes
from ..planning.job import StreamJob
from ..planning.tiling import Chains, FrameTile, Tiles, cut_tiles
from .cache_offload import Parking
from .output import Output, TiledChunk


class Target(Protocol):
    """Takes the output of tiles for one chunk, from one thread or more."""

    def put(
        self, x: Tensor, start: int, rows: Span, columns: Span, coding: Coding | None = None
    ) -> None:
        """Take a part `[B, C, n, h, w]` of the frames from `start` on; `coding` has made it."""
        ...


class TiledExecutor(Executor):
    """An executor for the layers on whole frames, with one executor per tile for the others."""

    records = False

    def __init__(
        self,
        whole: Chains,
        tiles: list[FrameTile],
        size: Size,
        new_cache: Callable[[], TemporalCache],
        part_bytes: int,
    ) -> None:
        super().__init__(whole, new_cache(), part_bytes)
        self.parking: Parking | None = None
        self._size = frame_sizes(tiles[0].layers, size)[-1]
        self.tiles = [(tile, Executor(tile.chains, new_cache(), part_bytes)) for tile in tiles]

    def fill(self, runs: Iterable[Tensor], target: Target) -> None:
        """Push the runs `[B, C, T, H, W]` of one chunk through each tile, into a target."""
        following = [part.cache for _, part in self.tiles[1:]]
        for index, (tile, part) in enumerate(self.tiles):
            if self.parking is not None:
                self.parking.wait(part.cache)
                for cache in following[index : index + 1]:
                    self.parking.fetch(cache)
            done = 0
            for run in runs:
                for frames in part.advance(run):
                    target.put(frames, done, tile.rows, tile.columns, part.cache.coding)
                    done += frames.shape[2]
            if self.parking is not None:
                self.parking.park(part.cache)

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through; yield runs of its results."""
        return self.rest(self.run(x))

    def target(self, x: Tensor) -> Target:
        """Return the target of the tiles for a chunk `x` `[B, C, T, H, W]`."""
        raise NotImplementedError

    def run(self, x: Tensor, target: Target | None = None) -> Target:
        """Push one chunk `x` through the tiles, into a target that other executors share."""
        raise NotImplementedError

    def rest(self, target: Any) -> Iterator[Tensor]:  # noqa: ANN401, of this executor
        """Yield runs of the results of a chunk, of which all tiles are in `target`."""
        raise NotImplementedError

    @property
    def caches(self) -> list[TemporalCache]:
        """The cache of the whole frames, then those of the tiles."""
        return [self.cache, *(part.cache for _, part in self.tiles)]


class TiledDecode(TiledExecutor):
    """A decoder: whole frames first, then tiles, which are written to `output`."""

    output: Output

    def takes(self, frames: int, repeats: int) -> int | None:
        """Return None: a decode needs all `frames` for any `repeats`."""
        return None

    def target(self, x: Tensor) -> TiledChunk:
        """Return the place of the frames of a chunk `x` `[B, C, T, H, W]`."""
        return self.output.chunk(x, first=self.cache.first)

    def run(self, x: Tensor, target: Target | None = None) -> Target:
        """Push one chunk through, and write the frames of the tiles to a target."""
        runs = list(Executor.advance(self, x))
        # Now the layers on whole frames have freed their memory.
        target = target or self.target(x)
        self.fill(runs, target)
        return target

    def rest(self, target: TiledChunk) -> Iterator[Tensor]:
        """Yield all frames of a chunk together."""
        yield target.piece


class Joined:
    """The output of the tiles of an encoder, before the layers on whole frames."""

    whole: Tensor  # `[B, C, T, H, W]`, from the first part on

    def __init__(self, like: Tensor, frames: int, size: Size) -> None:
        self._like, self._frames, self._size = like, frames, size
        self._lock = threading.Lock()

    def put(
        self, x: Tensor, start: int, rows: Span, columns: Span, coding: Coding | None = None
    ) -> None:
        """Copy a part `[B, C, n, h, w]` of the frames from `start` on; encodes have no `coding`."""
        with self._lock:
            if not hasattr(self, "whole"):
                self.whole = new_video(self._like, (*x.shape[:2], self._frames, *self._size))
        place = self.whole[:, :, start : start + x.shape[2]]
        place[..., slice(*rows), slice(*columns)].copy_(x)


class TiledEncode(TiledExecutor):
    """An encoder: tiles first, then whole frames."""

    _frames: int | None = None  # of the announced chunk
    _taken: int | None = None  # frames that the layers on whole frames need

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk of `frames` with `repeats` to the tiles, then to the other layers."""
        # All tiles have the same temporal reach.
        wanted, *_ = [part.takes(frames, repeats) for _, part in self.tiles]
        behind = self.tiles[0][1].behind
        self._taken = super().takes(behind.frames, behind.frames - behind.fresh + 1)
        self._frames = frames
        return wanted

    def target(self, x: Tensor) -> Joined:
        """Return memory for the output of the tiles for a chunk `x`, or its first frames."""
        frames, self._frames = self._frames or x.shape[2], None
        if not self.cache.first:
            layers = self.tiles[0][0].layers
            frames //= math.prod(each for layer in layers for _, each in causal_taps(layer))
        return Joined(x, frames, self._size)

    def run(self, x: Tensor, target: Target | None = None) -> Target:
        """Push one chunk through the tiles, which are joined in a target."""
        target = target or self.target(x)
        self.fill([x], target)
        return target

    def rest(self, target: Joined) -> Iterator[Tensor]:
        """Push the joined frames through the layers on whole frames; yield runs of results."""
        return Executor.advance(self, target.whole[:, :, : self._taken])


def tiled_executor(
    job: StreamJob,
    tiles: Tiles,
    new_cache: Callable[[], TemporalCache],
    part_bytes: int,
    *,
    parked: bool,
) -> TiledDecode | TiledEncode:
    """Return the executor of the tiles of whole frames, or of a band."""
    kind = TiledEncode if job.encodes else TiledDecode
    executor = kind(*cut_tiles(job, tiles), new_cache, part_bytes)
    if parked:
        executor.parking = Parking(job.device)
    return executor
