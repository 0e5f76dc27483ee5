"""The executor that runs some layers on whole frames and the others tile by tile."""

from collections.abc import Callable, Iterator

from torch import Tensor

from ...kernels import new_video
from ..layers.frame_runs import Settling
from ..layers.temporal_cache import TemporalCache
from ..models.receptive_field import Size, frame_sizes
from ..planning.tiling import Chains, FrameTile
from .cache_offload import Parking
from .executor import Executor
from .output import Output, TiledChunk


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

    @property
    def caches(self) -> list[TemporalCache]:
        """The cache of the whole frames, then those of the tiles."""
        return [self.cache, *(part.cache for _, part in self.tiles)]

    def in_turn(self) -> Iterator[tuple[FrameTile, Executor]]:
        """Yield the tiles in order, each with its tails on the device."""
        following = [part.cache for _, part in self.tiles[1:]]
        for index, (tile, part) in enumerate(self.tiles):
            if self.parking is not None:
                self.parking.wait(part.cache)
                for cache in following[index : index + 1]:
                    self.parking.fetch(cache)
            yield tile, part
            if self.parking is not None:
                self.parking.park(part.cache)


class TiledDecode(TiledExecutor):
    """A decoder: whole frames first, then tiles, which are written to `output`."""

    output: Output

    def takes(self, frames: int, repeats: int) -> int | None:
        """Return None: a decode needs all `frames` for any `repeats`."""
        return None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through; yield all of its frames together."""
        chunk = self.fill(x, lambda: self.output.chunk(x, first=self.cache.first))
        yield chunk.piece

    def fill(self, x: Tensor, target: Callable[[], TiledChunk]) -> TiledChunk:
        """Push one chunk through, and write the frames of the tiles to a target."""
        # The target is asked for once the layers on whole frames have freed their memory.
        runs = list(super().advance(x))
        chunk = target()
        for tile, part in self.in_turn():
            done = 0
            for run in runs:
                for frames in part.advance(run):
                    chunk.put(frames, done, tile.rows, tile.columns)
                    done += frames.shape[2]
        return chunk


class TiledEncode(TiledExecutor):
    """An encoder: tiles first, then whole frames."""

    _taken: int | None = None  # frames that the layers on whole frames need

    @property
    def behind(self) -> Settling:
        """The output of the tiles for the chunk that was passed to `takes`."""
        return self.tiles[0][1].behind

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk of `frames` with `repeats` to the tiles, then to the other layers."""
        wanted = self.takes_tiles(frames, repeats)
        behind = self.behind
        self._taken = super().takes(behind.frames, behind.frames - behind.fresh + 1)
        return wanted

    def takes_tiles(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk of `frames` with `repeats`; all tiles have the same temporal reach."""
        wanted, *_ = [part.takes(frames, repeats) for _, part in self.tiles]
        return wanted

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through, tile by tile first."""
        yield from super().advance(self.join(x, None)[:, :, : self._taken])

    def join(self, x: Tensor, whole: Tensor | None) -> Tensor:
        """Push one chunk through the tiles into `whole` `[B, C, T, H, W]`, or new memory."""
        for tile, part in self.in_turn():
            runs = list(part.advance(x))
            if whole is None:
                frames = sum(run.shape[2] for run in runs)
                shape = (*runs[0].shape[:2], frames, *self._size)
                whole = new_video(x, shape)
            done = 0
            for run in runs:
                place = whole[:, :, done : done + run.shape[2]]
                place = place[..., slice(*tile.rows), slice(*tile.columns)]
                place.copy_(run)
                done += run.shape[2]
        if whole is None:
            raise ValueError("the executor has no tiles; expected at least one")
        return whole
