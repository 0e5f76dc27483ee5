"""What a stream takes of memory and of time, from the numbers of its layers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .dry_run import CropSpec, DryRun, Setting, SpecChains
from .layer_specs import LayerSpec, NetworkSpec, Shape, lengths_before
from .tiling import Size, Span

# What a stream leaves in a process: code that oneDNN makes, its scratch, Python's own. 2 to 6
# MB in 30 streams of all families, 256 x 256 to 480 x 832, on two cores, 2026-11. What glibc's heap
# keeps of small blocks that were freed is not in it: 5 to 80 MB, whatever the size of the frames.
BASE_BYTES = 4 << 20

# What cuDNN's convolutions take for themselves; to be measured, see tests/benchmarks/PENDING.md.
_CUDNN_WORKSPACE_BYTES = 0

# Tiles whose tails are on the device though they are parked: one at work, one that comes, and one
# that has not left yet.
_THERE = 3


@dataclass(frozen=True)
class LayerRun:
    """Layers in a row; what of one latent enters each, and leaves the last."""

    layers: Sequence[LayerSpec] = ()
    shapes: Sequence[Shape] = ()

    @property
    def largest(self) -> int:
        """Numbers where frames are smallest, or where those of a step come together; the most."""
        smallest = min((shape.height for shape in self.shapes), default=0)
        numbers = [
            shape.numel for layer, shape in self._pairs if shape.height == smallest or layer.pairs
        ]
        return max(numbers, default=0)

    @property
    def remembered(self) -> int:
        """Numbers that they remember."""
        return sum(layer.remembered(shape) for layer, shape in self._pairs)

    def work(self, *, single_frame: bool) -> int:
        """Products of numbers, about."""
        return sum(layer.work(shape, single_frame=single_frame) for layer, shape in self._pairs)

    def chains(self, *, cropped: bool = False) -> SpecChains:
        """As `Network.chains`; of a tile with what cuts the halo off as `tiling.make_tile`."""
        chains: SpecChains = [[]]
        if cropped:
            chains[0].append(CropSpec(*self.shapes[0][2:]))
        for index, (layer, shape) in enumerate(self._pairs, 1):
            if layer.pairs:
                chains.append([])
            chains[-1].append(layer)
            size = self.shapes[index][2:]
            if cropped and layer.after(shape, single_frame=True)[2:] != size:
                chains[-1].append(CropSpec(*size))
        return chains

    @property
    def _pairs(self) -> Sequence[tuple[LayerSpec, Shape]]:
        return list(zip(self.layers, self.shapes[:-1], strict=True))


@dataclass(frozen=True)
class StreamCost:
    """What a stream goes through.

    Attributes:
        setting: Where.
        encodes: Tiles come before the whole frames.
        frames: What of one latent enters an encoder or leaves a decoder.
        whole: The layers on whole frames.
        tile: Those in tiles, of the largest tile; none: there are no tiles.
        tiles: Likewise, of all tiles together.
        parked: What tiles remember is on the host but while they run.
    """

    setting: Setting
    encodes: bool
    frames: Shape
    whole: LayerRun
    tile: LayerRun = LayerRun()
    tiles: LayerRun = LayerRun()
    parked: bool = False

    @functools.cached_property
    def work(self) -> int:
        """Products for one latent."""
        works = (
            run.work(single_frame=self.setting.single_frame) for run in (self.whole, self.tiles)
        )
        return self.setting.batch * sum(works)

    @functools.cached_property
    def latent_bytes(self) -> int:
        """The largest activation of one latent that is small, or collected."""
        return self._nbytes(max(self.whole.largest, self.tile.largest))

    @functools.cached_property
    def kept_bytes(self) -> int:
        """What the layers remember on the device."""
        tiles = _THERE * self.tile.remembered if self.parked else self.tiles.remembered
        return 0 if self.setting.single_frame else self._nbytes(self.whole.remembered + tiles)

    @property
    def moved_bytes(self) -> int:
        """What goes to the host and back once a chunk."""
        return 2 * self._nbytes(self.tiles.remembered) if self.parked else 0

    def peak_bytes(self, chunk: int, part_bytes: int) -> int:
        """Memory that the stream takes beside weights, input and output; an estimate.

        The latents of a step and the size of a part are as for the executor.
        """
        rehearsal = DryRun(self.setting, part_bytes, self.kept_bytes)
        x, frames = (
            shape.lasting(shape.frames * chunk) for shape in (self.whole.shapes[0], self.frames)
        )
        whole, tiled = self._chains
        # The second chunk meets what the first has left behind.
        for _ in range(1 if self.setting.single_frame else 2):
            if not self.tile.layers:
                rehearsal.whole_frames(whole, x)
            elif self.encodes:
                rehearsal.tiled_encode(tiled, whole, frames, x)
            else:
                rehearsal.tiled_decode(whole, tiled, x, frames)
        fixed = BASE_BYTES if self.setting.on_cpu else _CUDNN_WORKSPACE_BYTES
        return fixed + rehearsal.peak_bytes

    @functools.cached_property
    def _chains(self) -> tuple[SpecChains, SpecChains]:
        return self.whole.chains(), self.tile.chains(cropped=bool(self.tile.layers))

    def _nbytes(self, numbers: int) -> int:
        return numbers * self.setting.batch * self.setting.itemsize


def whole_cost(network: NetworkSpec, setting: Setting, size: Size) -> StreamCost:
    """What a stream goes through on whole frames; `size` is that of what enters the network."""
    shapes = network.shapes(size, single_frame=setting.single_frame)
    frames = shapes[0 if network.encodes else -1]
    return StreamCost(setting, network.encodes, frames, LayerRun(network.layers, shapes))


def tiled_cost(
    network: NetworkSpec,
    setting: Setting,
    size: Size,
    cut: int,
    spans: tuple[Sequence[Span], Sequence[Span]],
) -> StreamCost:
    """What a stream goes through that runs partly in tiles.

    Args:
        network: The encoder or the decoder.
        setting: Where it runs.
        size: As for `whole_cost`.
        cut: Layers before the cut.
        spans: Rows that tiles give of the frames that leave the tiled layers, and columns.
    """
    stream = whole_cost(network, setting, size)
    layers, shapes = stream.whole.layers, stream.whole.shapes
    tiled, whole = LayerRun(layers[:cut], shapes[: cut + 1]), LayerRun(layers[cut:], shapes[cut:])
    if not network.encodes:
        tiled, whole = whole, tiled
    axes = [
        [lengths_before(tiled.layers, length, span) for span in axis]
        for length, axis in zip(tiled.shapes[0][2:], spans, strict=True)
    ]

    def of(each: Callable[[Sequence[int]], int]) -> LayerRun:
        sizes = zip(
            *([each(many) for many in zip(*axis, strict=True)] for axis in axes), strict=True
        )
        pairs = zip(tiled.shapes, sizes, strict=True)
        return LayerRun(tiled.layers, [shape.sized(*size) for shape, size in pairs])

    return replace(stream, whole=whole, tile=of(max), tiles=of(sum))
