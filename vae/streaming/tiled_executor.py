"""The executor that runs some layers on whole frames and the others tile by tile."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...kernels import new_video
from ..layers.frame_runs import Settling
from ..layers.temporal_cache import TemporalCache
from ..models.receptive_field import Size, frame_sizes
from ..planning.tiling import Chains, FrameTile
from .cache_offload import Parking
from .executor import Executor, Tails
from .output import Output, TiledChunk

_Target = TypeVar("_Target", bound=TiledChunk | None)


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
        self._layers = tiles[0].layers
        self.sizes = frame_sizes(self._layers, size)
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
                part.cache.attempt(functools.partial(self.parking.wait, part.cache))
                for cache in following[index : index + 1]:
                    cache.attempt(functools.partial(self.parking.fetch, cache))
            yield tile, part
            if self.parking is not None:
                part.cache.attempt(functools.partial(self.parking.park, part.cache))

    def settle(self) -> None:
        """Wait for copies of tails."""
        if self.parking is not None:
            self.parking.settle()

    def tails(self) -> Tails:
        """Return the tails `[B, C, context, H, W]` of whole frames, on the host."""
        self.settle()
        found = self.cache.tails()
        convs = {conv for _, part in self.tiles for conv in part.cache.tails()}
        return found | {conv: self._joined(conv) for conv in convs}

    def take(self, tails: Tails) -> None:
        """Continue with `tails` of whole frames, cut for each tile."""
        inner = {module for layer in self._layers for module in layer.modules()}
        self.cache.take({conv: tail for conv, tail in tails.items() if conv not in inner})
        for tile, part in self.tiles:
            part.cache.take(
                {conv: self._cut(tail, tile, conv) for conv, tail in tails.items() if conv in inner}
            )

    def index_of(self, conv: nn.Module) -> int:
        """Return the index of the tiled layer that the convolution `conv` belongs to."""
        return next(i for i, layer in enumerate(self._layers) if conv in layer.modules())

    def _cut(self, tail: Tensor, tile: FrameTile, conv: nn.Module) -> Tensor:
        """Return the part of a tail of whole frames that a tile holds."""
        index = self.index_of(conv)
        # A layer that makes frames smaller keeps the smaller frames.
        rows, columns = (
            slice(start * length // full, stop * length // full)
            for (start, stop), length, full in zip(
                tile.spans[index], tail.shape[-2:], self.sizes[index], strict=True
            )
        )
        return tail[..., rows, columns].contiguous(memory_format=torch.channels_last_3d)

    def _joined(self, conv: nn.Module) -> Tensor:
        """Join the tails of a convolution to the whole frame, without the halos."""
        pieces = [(tile, part.cache.tails()[conv]) for tile, part in self.tiles]
        return join_tails(pieces, self.index_of(conv), self.sizes)


def join_tails(
    pieces: Sequence[tuple[FrameTile, Tensor]], index: int, sizes: Sequence[Size]
) -> Tensor:
    """Join the tails of a convolution in tiles to `[B, C, context, H, W]` on the host."""
    full, end = sizes[index], sizes[-1]
    whole: Tensor | None = None
    for tile, tail in pieces:
        seen = tile.spans[index]
        if whole is None:
            # For example 1/2, if the layer makes frames smaller.
            down = (seen[0][1] - seen[0][0]) // tail.shape[-2]
            height, width = (length // down for length in full)
            shape = (*tail.shape[:3], height, width)
            whole = torch.empty(shape, dtype=tail.dtype, memory_format=torch.channels_last_3d)
        place = []
        for (start, stop), length, size, (first, _) in zip(
            (tile.rows, tile.columns), whole.shape[-2:], end, seen, strict=True
        ):
            down = full[0] // whole.shape[-2]
            begin, finish = start * length // size, stop * length // size
            place.append(
                (slice(begin, finish), slice(begin - first // down, finish - first // down))
            )
        (rows, own_rows), (columns, own_columns) = place
        whole[..., rows, columns] = tail[..., own_rows, own_columns]
    if whole is None:
        raise ValueError("the executor has no tiles; expected at least one")
    return whole


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

    def fill(
        self,
        x: Tensor,
        target: Callable[[], _Target],
        attempt: Callable[..., Any] | None = None,
    ) -> _Target:
        """Push one chunk through, and write the frames of the tiles to a target, or drop them."""
        # The target is asked for once the layers on whole frames have freed their memory.
        runs = list(super().advance(x))
        chunk = target()
        for tile, part in self.in_turn():
            done = 0
            for run in runs:
                for frames in part.advance(run):
                    if chunk is not None:
                        chunk.put(frames, done, tile.rows, tile.columns, attempt)
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
                shape = (*runs[0].shape[:2], frames, *self.sizes[-1])
                whole = part.cache.attempt(functools.partial(new_video, x, shape))
            done = 0
            for run in runs:
                place = whole[:, :, done : done + run.shape[2]]
                place = place[..., slice(*tile.rows), slice(*tile.columns)]
                part.cache.attempt(functools.partial(place.copy_, run))
                done += run.shape[2]
        if whole is None:
            raise ValueError("the executor has no tiles; expected at least one")
        return whole
