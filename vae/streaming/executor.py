"""The ways of a video through the network: on whole frames, or partly in tiles.

A route holds the state of the video, so that the video can go on on another route: what the layers
remember is put together to whole frames there and cut anew.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..layers.causal_layer import CausalLayer
from ..models.receptive_field import Size, frame_sizes
from ..planning.tiling import Chains, Tile
from .cache_offload import Parking
from .lanes import Lane
from .output import Output

# Whole frames of what each convolution remembers.
Tails = dict[nn.Module, Tensor]

NewLane = Callable[[Sequence[Sequence[CausalLayer]]], Lane]


class Route(ABC):
    """A way through the network, with the state of the video.

    Attributes:
        records: One chunk may be recorded as a graph: all of it is done in one `advance` of a lane.
    """

    records = False

    @property
    @abstractmethod
    def lanes(self) -> list[Lane]:
        """Its parts."""

    @abstractmethod
    def takes(self, frames: int, alike: int) -> int | None:
        """Tell of the next chunk; see `Lane.takes`."""

    @abstractmethod
    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk through.

        Args:
            x: `[B, C, T, H, W]`, channels-last: all of it, or the frames that it takes.

        Yields:
            Runs of frames, for `finish`.
        """

    def finish(self, x: Tensor) -> Tensor:
        """What a run of frames is given away as."""
        return x

    @abstractmethod
    def tails(self) -> Tails:
        """What is remembered, on whole frames."""

    @abstractmethod
    def take(self, tails: Tails) -> None:
        """Go on from what another route of the same video remembered."""

    def passed_first(self, *, pictures: bool) -> None:
        """Note that a chunk is through.

        Args:
            pictures: Every frame is a first one.
        """
        for lane in self.lanes:
            lane.cache.first = pictures


class WholeFrames(Route):
    """All layers on whole frames.

    Args:
        lane: The layers.
        finish: What a run of frames goes through last.
    """

    records = True

    def __init__(self, lane: Lane, finish: Callable[[Tensor], Tensor]) -> None:
        self._lane, self._finish = lane, finish

    @property
    def lanes(self) -> list[Lane]:
        """The one."""
        return [self._lane]

    def takes(self, frames: int, alike: int) -> int | None:
        """See `Route`."""
        return self._lane.takes(frames, alike)

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """See `Route`."""
        return self._lane.advance(x)

    def finish(self, x: Tensor) -> Tensor:
        """See `Route`."""
        return self._finish(x)

    def tails(self) -> Tails:
        """See `Route`."""
        return self._lane.cache.tails()

    def take(self, tails: Tails) -> None:
        """See `Route`."""
        self._lane.cache.take(tails)


class Tiled(Route):
    """Some layers on whole frames and the others in tiles.

    Args:
        whole: The layers on whole frames.
        tiles: Those in tiles, of each tile.
        size: Height and width of the whole frames that enter these.
        new_lane: Makes a lane of its chains.

    Attributes:
        parking: Where what the tiles remember waits; None: it stays on the device.
    """

    def __init__(self, whole: Chains, tiles: list[Tile], size: Size, new_lane: NewLane) -> None:
        self.parking: Parking | None = None
        self._layers = tiles[0].layers
        self._sizes = frame_sizes(self._layers, size)
        self.whole = new_lane(whole)
        self.tiles = [(tile, new_lane(tile.chains)) for tile in tiles]

    @property
    def lanes(self) -> list[Lane]:
        """The whole frames first, then the tiles."""
        return [self.whole, *(lane for _, lane in self.tiles)]

    def in_turn(self) -> Iterator[tuple[Tile, Lane]]:
        """The tiles, each with what it remembers on the device."""
        following = [lane.cache for _, lane in self.tiles[1:]]
        for index, (tile, lane) in enumerate(self.tiles):
            if self.parking is not None:
                lane.cache.attempt(functools.partial(self.parking.wait, lane.cache))
                for cache in following[index : index + 1]:
                    cache.attempt(functools.partial(self.parking.fetch, cache))
            yield tile, lane
            if self.parking is not None:
                lane.cache.attempt(functools.partial(self.parking.park, lane.cache))

    def tails(self) -> Tails:
        """See `Route`; on the host."""
        if self.parking is not None:
            self.parking.settle()
        found = self.whole.cache.tails()
        convs = {conv for _, lane in self.tiles for conv in lane.cache.tails()}
        return found | {conv: self._joined(conv) for conv in convs}

    def take(self, tails: Tails) -> None:
        """See `Route`."""
        inner = {module for layer in self._layers for module in layer.modules()}
        self.whole.cache.take({conv: tail for conv, tail in tails.items() if conv not in inner})
        for tile, lane in self.tiles:
            lane.cache.take(
                {conv: self._cut(tail, *self._place(tile, conv, tail.shape[-2:]))
                 for conv, tail in tails.items() if conv in inner}
            )  # fmt: skip

    def _index(self, conv: nn.Module) -> int:
        """Which of the tiled layers a convolution belongs to."""
        return next(i for i, layer in enumerate(self._layers) if conv in layer.modules())

    def _place(self, tile: Tile, conv: nn.Module, whole: Sequence[int]) -> list[slice]:
        """Rows and columns of what a tile holds of a tail whose whole size is given."""
        index = self._index(conv)
        # A layer that makes frames smaller remembers those after it.
        return [
            slice(start * length // full, stop * length // full)
            for (start, stop), length, full in zip(
                tile.spans[index], whole, self._sizes[index], strict=True
            )
        ]

    def _cut(self, tail: Tensor, rows: slice, columns: slice) -> Tensor:
        return tail[..., rows, columns].contiguous(memory_format=torch.channels_last_3d)

    def _joined(self, conv: nn.Module) -> Tensor:
        """The tail of a convolution on the whole frame: of each tile what no halo has spoiled."""
        index = self._index(conv)
        full = self._sizes[index]
        whole: Tensor | None = None
        for tile, lane in self.tiles:
            tail = lane.cache.tails()[conv]
            seen = tile.spans[index]
            if whole is None:
                # Such as 1/2, where the layer makes frames smaller.
                down = (seen[0][1] - seen[0][0]) // tail.shape[-2]
                height, width = (length // down for length in full)
                memory = (*tail.shape[:1], *tail.shape[2:3], height, width, tail.shape[1])
                whole = torch.empty(memory, dtype=tail.dtype).permute(0, 4, 1, 2, 3)
            place = []
            for (start, stop), length, size, (first, _) in zip(
                (tile.rows, tile.columns), whole.shape[-2:], self._sizes[-1], seen, strict=True
            ):
                down = full[0] // whole.shape[-2]
                begin, end = start * length // size, stop * length // size
                place.append((slice(begin, end), slice(begin - first // down, end - first // down)))
            (rows, own_rows), (columns, own_columns) = place
            whole[..., rows, columns] = tail[..., own_rows, own_columns]
        if whole is None:
            raise ValueError("there are no tiles; expected at least one")
        return whole


class TiledDecode(Tiled):
    """A decoder: first whole frames, then tiles.

    Args:
        whole: See `Tiled`.
        tiles: See `Tiled`.
        size: See `Tiled`.
        new_lane: See `Tiled`.
        output: Takes the frames.
        frames_per_latent: Frames that a latent becomes, but for the first.
        shape: Channels, height and width of the images.
    """

    def __init__(
        self,
        whole: Chains,
        tiles: list[Tile],
        size: Size,
        new_lane: NewLane,
        output: Output,
        frames_per_latent: int,
        shape: tuple[int, int, int],
    ) -> None:
        super().__init__(whole, tiles, size, new_lane)
        self._output, self._per_latent, self._shape = output, frames_per_latent, shape

    def takes(self, frames: int, alike: int) -> int | None:
        """See `Route`; a decode needs all frames."""
        return None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """See `Route`."""
        count = 1 if self.whole.cache.first else x.shape[2] * self._per_latent
        runs = list(self.whole.advance(x))
        chunk = self._output.chunk(x, count, self._shape)
        for tile, lane in self.in_turn():
            done = 0
            for run in runs:
                for frames in lane.advance(run):
                    chunk.put(frames, done, tile.rows, tile.columns)
                    done += frames.shape[2]
        yield chunk.piece


class TiledEncode(Tiled):
    """An encoder: first tiles, then whole frames.

    Args:
        whole: See `Tiled`.
        tiles: See `Tiled`.
        size: See `Tiled`.
        new_lane: See `Tiled`.
        finish: What latents go through last.
    """

    def __init__(
        self,
        whole: Chains,
        tiles: list[Tile],
        size: Size,
        new_lane: NewLane,
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(whole, tiles, size, new_lane)
        self._finish = finish
        self._taken: int | None = None  # frames that the layers on whole frames want

    def takes(self, frames: int, alike: int) -> int | None:
        """See `Route`; all tiles see as far back as each other."""
        wanted, *_ = [lane.takes(frames, alike) for _, lane in self.tiles]
        behind = self.tiles[0][1].behind
        self._taken = self.whole.takes(behind.frames, behind.frames - behind.fresh + 1)
        return wanted

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """See `Route`."""
        whole: Tensor | None = None
        for tile, lane in self.in_turn():
            runs = list(lane.advance(x))
            if whole is None:
                frames = sum(run.shape[2] for run in runs)
                memory = (x.shape[0], frames, *self._sizes[-1], runs[0].shape[1])
                empty = functools.partial(x.new_empty, memory)
                whole = lane.cache.attempt(empty).permute(0, 4, 1, 2, 3)
            done = 0
            for run in runs:
                part = whole[:, :, done : done + run.shape[2]]
                part[..., slice(*tile.rows), slice(*tile.columns)] = run
                done += run.shape[2]
        if whole is not None:
            yield from self.whole.advance(whole[:, :, : self._taken])

    def finish(self, x: Tensor) -> Tensor:
        """See `Route`."""
        return self._finish(x)
