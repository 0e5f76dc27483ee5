"""What a stream takes of memory and of time, from the numbers of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from .dry_run import Chains, Crop, Rehearsal, Setting
from .layer_specs import Outline, Shape, Stage, lengths_before
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
class Load:
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
    whole: Chains
    tiled: Chains
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

        Args:
            chunk: Latents a step.
            part_bytes: As for `stream.advance`.
        """
        rehearsal = Rehearsal(self.setting, part_bytes, self.kept_bytes)
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


def whole_load(network: Outline, setting: Setting, size: Size) -> Load:
    """What a stream goes through on whole frames.

    Args:
        network: The encoder or the decoder.
        setting: Where it runs.
        size: Height and width of what enters it.
    """
    stages = network.stages
    shapes = network.shapes(size, lone=setting.lone)
    kept = _remembered(stages, shapes, setting)
    work = _work(stages, shapes, setting)
    chains = _chains(stages)
    ends = shapes[0], shapes[-1], shapes[0]
    latent = _latent_bytes(stages, shapes, setting)
    return Load(setting, chains, [], network.encodes, *ends, latent, kept, 0, 0, work)


def tiled_load(
    network: Outline,
    setting: Setting,
    size: Size,
    cut: int,
    spans: tuple[Sequence[Span], Sequence[Span]],
) -> Load:
    """What a stream goes through that runs partly in tiles.

    Args:
        network: The encoder or the decoder.
        setting: Where it runs.
        size: Height and width of what enters it.
        cut: Layers before the cut.
        spans: Rows that tiles give of the frames that leave the tiled layers, and columns.
    """
    shapes = network.shapes(size, lone=setting.lone)
    inner, outer = slice(0, cut), slice(cut, None)
    if not network.encodes:
        inner, outer = outer, inner
    stages, at = network.stages[inner], inner.start or 0
    axes = [
        [lengths_before(stages, length, span) for span in axis]
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
    rest = network.stages[outer]
    before = shapes[outer.start or 0 :]
    return Load(
        setting,
        _chains(rest),
        _chains(stages, largest),
        network.encodes,
        shapes[0],
        shapes[-1],
        shapes[cut],
        max(_latent_bytes(stages, largest, setting), _latent_bytes(rest, before, setting)),
        _remembered(rest, before, setting),
        _remembered(stages, every, setting),
        _remembered(stages, largest, setting),
        _work(stages, every, setting) + _work(rest, before, setting),
    )


def _of(shape: Shape, latents: int) -> Shape:
    return shape.lasting(shape.frames * latents)


def _remembered(stages: Sequence[Stage], shapes: Sequence[Shape], setting: Setting) -> int:
    if setting.lone:
        return 0
    pairs = zip(stages, shapes, strict=False)
    numbers = sum(stage.remembered(shape) for stage, shape in pairs)
    return numbers * setting.batch * setting.itemsize


def _latent_bytes(stages: Sequence[Stage], shapes: Sequence[Shape], setting: Setting) -> int:
    smallest = min(shape.height for shape in shapes)
    numbers = [
        shape.numel
        for shape, stage in zip(shapes, stages, strict=False)
        if shape.height == smallest or stage.pairs
    ]
    return max(numbers, default=0) * setting.batch * setting.itemsize


def _work(stages: Sequence[Stage], shapes: Sequence[Shape], setting: Setting) -> int:
    pairs = zip(stages, shapes, strict=False)
    return setting.batch * sum(stage.work(shape, lone=setting.lone) for stage, shape in pairs)


def _chains(stages: Sequence[Stage], tile: Sequence[Shape] = ()) -> Chains:
    """As `Network.chains`, and for a tile with what cuts the halo off as `tiling.make_tile`."""
    chains: Chains = [[]]
    if tile:
        chains[0].append(Crop(*tile[0][2:]))
    for index, stage in enumerate(stages):
        if stage.pairs:
            chains.append([])
        chains[-1].append(stage)
        if tile and stage.after(tile[index], lone=True)[2:] != tile[index + 1][2:]:
            chains[-1].append(Crop(*tile[index + 1][2:]))
    return chains
