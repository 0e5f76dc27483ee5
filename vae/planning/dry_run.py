"""A stream without its data: its allocations are recorded, and its traffic and launches.

It follows the layers like the executor: a change of the memory that a layer holds must be made here
too (`tests/vae/planning/test_plan.py`). The traffic decides between plans on a GPU, so it is
approximate: each pass counts its large tensors, and attention counts as its projections.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..layers.frame_runs import largest_part
from ..layers.row_bands import WORTH_IT
from .layer_specs import ConvSpec, LayerSpec, PartSpec, Shape
from .ledger import Block, Ledger, Setting

# Attention on a GPU in blocks: the head size above which blocks are used, the scores of a block,
# and the bytes of a score and its softmax (kernels/reference/attention.py).
_FUSED_HEAD = 256
_SCORES = 1 << 26
_SCORE_BYTES = 8


class TileCount(NamedTuple):
    """The tiles of a frame: their number, and their area in areas of the largest one."""

    count: int = 1
    area: float = 1.0


class CropSpec(NamedTuple):
    """A `LayerSpec` of a crop to a height and a width, which removes the halo of a tile."""

    height: int
    width: int
    growth = 1

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """Return the output shape for `shape`; the crop is the same for a `single_frame`."""
        return shape.sized(*self)


SpecChains = list[list[LayerSpec | CropSpec]]


class DryRun:
    """One video without its data, in parts of `part_bytes`, next to tails of `kept_bytes`."""

    def __init__(self, setting: Setting, part_bytes: int, kept_bytes: int) -> None:
        self._ledger = Ledger(setting, kept_bytes)
        self._setting, self._part_bytes = setting, part_bytes
        self._piece: Block | None = None  # a caller frees a piece when it has the next one
        self._tiles, self._repeats = TileCount(), 1
        self.moved_bytes, self.launches = 0.0, 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once, with `Ledger.excess`."""
        return self._ledger.peak + self._ledger.excess

    def whole_frames(self, chains: SpecChains, shape: Shape) -> None:
        """Run `Executor.advance` on a chunk of `shape` through `chains`."""
        x = self._ledger.new(shape)
        self._piece = self._advance(chains, x, shape, collects=False).last

    def tiled_decode(
        self,
        whole: SpecChains,
        tile: SpecChains,
        tiles: TileCount,
        shape: Shape,
        leaving: Shape,
    ) -> None:
        """Run `TiledDecode.advance` without a buffer of the caller; `tile` is the largest one."""
        x = self._ledger.new(shape)
        runs = self._advance(whole, x, shape, collects=True)
        chunk = self._ledger.new(leaving)
        self._each(tile, tiles, runs)
        self._piece = chunk

    def tiled_encode(
        self,
        tile: SpecChains,
        whole: SpecChains,
        tiles: TileCount,
        shape: Shape,
        between: Shape,
    ) -> None:
        """Run `TiledEncode.advance` to the shape `between` tiles and whole frames."""
        x = self._ledger.new(shape)
        joined = self._ledger.new(between)  # allocated after the first tile, before the second
        runs = self._each(tile, tiles, _Runs(x, shape, 1, []))
        self._piece = self._advance(whole, joined, between, collects=False).last
        del runs

    def _each(self, tile: SpecChains, tiles: TileCount, runs: "_Runs") -> "_Runs":
        """Run the tiles; the last one with what the tile before it has left allocated."""
        if self._setting.single_frame:
            self._repeats = 0
            self._advance(tile, runs.last, runs.shape, collects=False)
        self._tiles, self._repeats = tiles, runs.count
        made = self._advance(tile, runs.last, runs.shape, collects=True)
        self._tiles, self._repeats = TileCount(), 1
        return made

    def _advance(self, chains: SpecChains, x: "Block", shape: Shape, *, collects: bool) -> "_Runs":
        """Run `advance` of the executor."""
        runs = self._run(chains[0], x, shape, collects=collects or len(chains) > 1)
        for number, (head, *tail) in enumerate(chains[1:], 2):
            shape = runs.joined
            joined = runs.last if runs.count == 1 else self._ledger.new(shape)
            if runs.count > 1:
                self._pass(2 * self._ledger.nbytes(shape))
            del runs
            z, out = self._through(head, joined, shape)
            runs = self._run(tail, z, out, collects=collects or number < len(chains))
            del z
        return runs

    def _run(
        self, layers: Sequence[LayerSpec | CropSpec], x: "Block", shape: Shape, *, collects: bool
    ) -> "_Runs":
        """Run the last part of a chunk; the others do the same with fewer results collected."""
        ledger, single_frame = self._ledger, self._setting.single_frame
        y = x
        for index, layer in enumerate(layers):
            nbytes = ledger.nbytes(shape) * layer.growth
            part = largest_part(shape.frames, nbytes, self._part_bytes)
            if part < shape.frames:
                run = shape.lasting(part)
                # The frames of a single video are contiguous, so a part of them is a view.
                z = ledger.new(run) if self._setting.batch > 1 else y
                count, before = shape.frames // part, []
                if collects:
                    end = run
                    for each in layers[index:]:
                        end = each.after(end, single_frame=single_frame)
                    before.append(ledger.new(end, count - 1))
                self._repeats *= count
                runs = self._run(layers[index:], z, run, collects=collects)
                self._repeats //= count
                return _Runs(runs.last, runs.shape, count * runs.count, before + runs.before)
            y, shape = self._through(layer, y, shape)
        return _Runs(y, shape, 1, [])

    def _through(
        self, layer: LayerSpec | CropSpec, x: "Block", shape: Shape
    ) -> "tuple[Block, Shape]":
        single_frame = self._setting.single_frame
        if isinstance(layer, CropSpec):
            after = layer.after(shape, single_frame=single_frame)
            self._pass(2 * self._ledger.nbytes(after))
            return self._ledger.new(after), after
        side = None
        if layer.holds == "result":
            side = self._ledger.new(layer.after(shape, single_frame=single_frame))
        elif layer.holds == "input":
            # A block with its own shortcut does not write into its input.
            side = x if layer.parts[0].mixed else self._ledger.new(shape)
        y = x
        for part in layer.parts:
            last = layer.holds == "result" and part is layer.parts[-1]
            y = self._part(part, y, shape, side if last and part.down > 1 else None)
            shape = part.after(shape, single_frame=single_frame)
        if layer.holds == "result" and layer.parts[-1].down == 1:
            y = self._ledger.new(shape)
        return y, shape

    def _part(self, part: PartSpec, x: "Block", shape: Shape, residual: "Block | None") -> "Block":
        if not part.products:
            return self._attention(part, shape)
        if part.up > 1:
            return self._up(part, shape)
        if part.down > 1:
            return self._down(part, shape, residual)
        return self._same(part, x, shape)

    def _attention(self, part: PartSpec, shape: Shape) -> "Block":
        """Allocate queries, keys and values, the attended values, and the result."""
        self._ledger.scratch(shape)
        *mixed, _ = part.mixed
        # Norm, projections and sum; the attention itself.
        self._pass((8 + 2 * len(mixed)) * self._ledger.nbytes(shape), 5)
        made = [self._ledger.new(shape.of(channels)) for channels in mixed]
        made.append(self._ledger.new(shape))
        if not self._setting.on_cpu and shape.channels > _FUSED_HEAD:
            rows = self._setting.batch * shape.frames * (shape.height * shape.width) ** 2
            scores = _SCORE_BYTES * min(rows, _SCORES)
            self._ledger.take(scores)
            self._ledger.take(-scores)
        return self._ledger.new(shape)

    def _same(self, part: PartSpec, x: "Block", shape: Shape) -> "Block":
        """Run one convolution, or two with a residual."""
        *before, last = part.products
        made, entering = [], self._ledger.nbytes(shape)
        for product in before:
            made.append(self._product(part, product, shape, biased=False))
            shape = shape.of(product.outputs)
        if not before:
            return self._product(part, last, shape)
        residual = self._ledger.new(shape) if part.mixed else x
        if part.mixed:
            self._pass(entering + self._ledger.nbytes(shape))
        # Wan's blocks hand the input of the last convolution over, which frees it before.
        given = None if part.banded else made
        return self._product(part, last, shape, residual, given=given)

    def _down(self, part: PartSpec, shape: Shape, residual: "Block | None") -> "Block":
        """Downsample in space, and in time if there is a second convolution."""
        first, *rest = part.products
        rest = [] if self._setting.single_frame else rest
        y = self._product(part, first, shape, None if rest else residual, part.down)
        if not rest:
            return y
        return self._product(part, rest[0], part.after(shape, single_frame=True), residual)

    def _up(self, part: PartSpec, shape: Shape) -> "Block":
        """Upsample in time if there is a first convolution, then in space."""
        *first, last = part.products
        made = []
        for product in [] if self._setting.single_frame else first:
            made.append(self._product(part, product, shape))
            shape = shape.lasting(shape.frames * part.times)
            self._ledger.scratch(shape)
            self._pass(2 * self._ledger.nbytes(shape))
        if last.context and not self._setting.single_frame:
            self._ledger.scratch(shape.lasting(shape.frames + last.context))
        height, width = shape.height + 1, shape.width + 1
        grid = Shape(4 * last.outputs, shape.frames, height, width)
        made.append(self._made(grid))
        times = 1 if self._setting.single_frame else last.times
        large = Shape(last.outputs, shape.frames * times, 2 * shape.height, 2 * shape.width)
        y = self._ledger.result(large)
        nbytes = self._ledger.nbytes
        self._pass(nbytes(shape) + 2 * times * nbytes(grid) + nbytes(large), 2 * times)
        made += [self._made(grid) for _ in range(times - 1)]
        return y

    def _product(
        self,
        part: PartSpec,
        product: ConvSpec,
        shape: Shape,
        residual: "Block | None" = None,
        down: int = 1,
        *,
        biased: bool = True,
        given: "list[Block] | None" = None,
    ) -> "Block":
        """Run `CausalConv3d.forward`."""
        setting, ledger = self._setting, self._ledger
        context = 0 if setting.single_frame else product.context
        window = shape.lasting(shape.frames + context)
        frames = shape.frames if setting.single_frame else shape.frames // product.stride
        out = Shape(product.outputs, frames, shape.height // down, shape.width // down)
        entering, leaving, packs = ledger.nbytes(shape), ledger.nbytes(out), product.packs
        tail = (written := entering // packs) // shape.frames * context
        # Norm into the window, the tail in front of it and behind; convolution; bias, residual.
        if product.windowed:
            self._pass(entering + written + 3 * tail)
        self._pass(written + tail + leaving)
        if biased:
            self._pass((2 if residual is None else 3) * leaving)
        rows = self._band(window) if part.banded else shape.height
        if rows < shape.height:
            ledger.scratch(window.sized(rows + 2, window.width))
            y = residual or ledger.result(out)
            tail = Shape(shape.channels, product.context, rows, shape.width)
            _ = ledger.new(tail), self._made(out.sized(rows, out.width))
            return y
        if product.windowed:
            border = 2 * (packs > 1)
            packed = window.of(window.channels // packs)
            ledger.scratch(packed.sized(window.height + border, window.width + border))
        if given:
            given.clear()
        # Copies in oneDNN's order; the weight of a first frame, which has fewer taps, also in
        # PyTorch's.
        arranged = 2 * product.rearranged_first if setting.single_frame else product.rearranged
        copies = arranged * setting.itemsize * (1 + setting.casts) * setting.on_cpu
        ledger.take(copies)
        if packs > 1 and residual:
            # oneDNN adds no residual to the sums of codes.
            y, _ = residual, ledger.new(out, int(setting.on_cpu))
        else:
            made = arranged or not setting.fused or packs > 1
            y = ledger.new(out) if made else residual or ledger.result(out)
        ledger.take(-copies)
        return y

    def _pass(self, nbytes: float, launches: int = 1) -> None:
        """Count `launches` passes over `nbytes` in all."""
        self.moved_bytes += nbytes * self._tiles.area * self._repeats
        self.launches += launches * self._tiles.count * self._repeats

    def _band(self, window: Shape) -> int:
        """Return the rows of a band as `row_bands.rows_of`."""
        row = self._ledger.nbytes(window.sized(1, window.width))
        if row * window.height <= WORTH_IT * self._part_bytes:
            return window.height
        return min(window.height, max(1, self._part_bytes // row - 2))

    def _made(self, shape: Shape) -> "Block":
        """Allocate the result of a convolution."""
        return self._ledger.result(shape) if self._setting.fused else self._ledger.new(shape)


class _Runs(NamedTuple):
    """The runs of an iterator: the last one, their number, and those before it."""

    last: "Block"
    shape: Shape
    count: int
    before: "list[Block]"

    @property
    def joined(self) -> Shape:
        """The shape of all runs together."""
        return self.shape.lasting(self.count * self.shape.frames)
