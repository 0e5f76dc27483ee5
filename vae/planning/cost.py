"""What a stream takes of memory and of time, from the numbers of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

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
class StreamCost:
    """What a stream goes through.

    Attributes:
        setting: Where.
        whole: The layers on whole frames.
        tiled: Those in tiles, of the largest tile; empty: there are none.
        encodes: The tiles come before the whole frames.
        entering: What enters of one latent.
        leaving: What leaves of one latent.
        between: What goes from the one to the other part, where there are tiles.
        latent_bytes: The largest activation of one latent where frames are smallest, or where those
            of a step come together.
        whole_kept: Bytes that the layers on whole frames remember.
        tiles_kept: Bytes that those in tiles remember of all tiles.
        tile_kept: Of the largest.
        work: Products for one latent.
        parked: What tiles remember is on the host but while they run.
    """

    setting: Setting
    whole: SpecChains
    tiled: SpecChains
    encodes: bool
    entering: Shape
    leaving: Shape
    between: Shape
    latent_bytes: int
    whole_kept: int
    tiles_kept: int
    tile_kept: int
    work: int
    parked: bool = False

    @property
    def kept_bytes(self) -> int:
        """What the layers remember on the device."""
        return self.whole_kept + (_THERE * self.tile_kept if self.parked else self.tiles_kept)

    @property
    def moved_bytes(self) -> int:
        """What goes to the host and back once a chunk."""
        return 2 * self.tiles_kept if self.parked else 0

    def peak_bytes(self, chunk: int, part_bytes: int) -> int:
        """Memory that the stream takes beside weights, input and output; an estimate.

        The latents of a step and the size of a part are as for the executor.
        """
        rehearsal = DryRun(self.setting, part_bytes, self.kept_bytes)
        # The second chunk meets what the first has left behind.
        for _ in range(1 if self.setting.lone else 2):
            x = _of(self.entering, chunk)
            if not self.tiled:
                rehearsal.whole_frames(self.whole, x)
            elif self.encodes:
                rehearsal.tiled_encode(self.tiled, self.whole, x, _of(self.between, chunk))
            else:
                rehearsal.tiled_decode(self.whole, self.tiled, x, _of(self.leaving, chunk))
        fixed = BASE_BYTES if self.setting.on_cpu else _CUDNN_WORKSPACE_BYTES
        return fixed + rehearsal.peak_bytes


def whole_cost(network: NetworkSpec, setting: Setting, size: Size) -> StreamCost:
    """What a stream goes through on whole frames; `size` is that of what enters the network."""
    layers = network.layers
    shapes = network.shapes(size, lone=setting.lone)
    kept = _remembered(layers, shapes, setting)
    work = _work(layers, shapes, setting)
    chains = _chains(layers)
    ends = shapes[0], shapes[-1], shapes[0]
    latent = _latent_bytes(layers, shapes, setting)
    return StreamCost(setting, chains, [], network.encodes, *ends, latent, kept, 0, 0, work)


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
    shapes = network.shapes(size, lone=setting.lone)
    inner, outer = slice(0, cut), slice(cut, None)
    if not network.encodes:
        inner, outer = outer, inner
    layers, at = network.layers[inner], inner.start or 0
    axes = [
        [lengths_before(layers, length, span) for span in axis]
        for length, axis in zip(shapes[at][2:], spans, strict=True)
    ]
    largest, every = (
        [
            shape.sized(height, width)
            for shape, height, width in zip(
                shapes[at:],
                *([each(many) for many in zip(*axis, strict=True)] for axis in axes),
                strict=False,
            )
        ]
        for each in (max, sum)
    )
    rest = network.layers[outer]
    before = shapes[outer.start or 0 :]
    return StreamCost(
        setting,
        _chains(rest),
        _chains(layers, largest),
        network.encodes,
        shapes[0],
        shapes[-1],
        shapes[cut],
        max(_latent_bytes(layers, largest, setting), _latent_bytes(rest, before, setting)),
        _remembered(rest, before, setting),
        _remembered(layers, every, setting),
        _remembered(layers, largest, setting),
        _work(layers, every, setting) + _work(rest, before, setting),
    )


def _of(shape: Shape, latents: int) -> Shape:
    return shape.lasting(shape.frames * latents)


def _remembered(layers: Sequence[LayerSpec], shapes: Sequence[Shape], setting: Setting) -> int:
    if setting.lone:
        return 0
    pairs = zip(layers, shapes, strict=False)
    numbers = sum(layer.remembered(shape) for layer, shape in pairs)
    return numbers * setting.batch * setting.itemsize


def _latent_bytes(layers: Sequence[LayerSpec], shapes: Sequence[Shape], setting: Setting) -> int:
    smallest = min(shape.height for shape in shapes)
    numbers = [
        shape.numel
        for shape, layer in zip(shapes, layers, strict=False)
        if shape.height == smallest or layer.pairs
    ]
    return max(numbers, default=0) * setting.batch * setting.itemsize


def _work(layers: Sequence[LayerSpec], shapes: Sequence[Shape], setting: Setting) -> int:
    pairs = zip(layers, shapes, strict=False)
    return setting.batch * sum(layer.work(shape, lone=setting.lone) for layer, shape in pairs)


def _chains(layers: Sequence[LayerSpec], tile: Sequence[Shape] = ()) -> SpecChains:
    """As `Network.chains`, and for a tile with what cuts the halo off as `tiling.make_tile`."""
    chains: SpecChains = [[]]
    if tile:
        chains[0].append(CropSpec(*tile[0][2:]))
    for index, layer in enumerate(layers):
        if layer.pairs:
            chains.append([])
        chains[-1].append(layer)
        if tile and layer.after(tile[index], lone=True)[2:] != tile[index + 1][2:]:
            chains[-1].append(CropSpec(*tile[index + 1][2:]))
    return chains
