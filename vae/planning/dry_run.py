"""A stream without its data: only its allocations are recorded.

It follows the layers like the executor, and records what each one allocates by the rules of the
real code: a change of the memory that a layer holds must be made here too. A block is freed when
the last variable that refers to it is gone, like the memory of a tensor.
`tests/vae/planning/test_plan.py` compares it with the allocations of streams and with processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layers.frame_runs import largest_part
from ..layers.row_bands import WORTH_IT
from ..layers.workspace import KEPT_BYTES, WASTE
from .layer_specs import ConvSpec, LayerSpec, PartSpec, Shape

# Attention on a GPU in blocks: the head size above which blocks are used, the scores of a block,
# and the bytes of a score and its softmax (kernels/reference/attention.py).
_FUSED_HEAD = 256
_SCORES = 1 << 26
_SCORE_BYTES = 8


@dataclass(frozen=True)
class Setting:
    """Conditions of a stream.

    Attributes:
        batch: Videos per batch.
        itemsize: Bytes of an element.
        single_frame: The video has one frame.
        on_cpu: The stream runs on a CPU, where large results are written to reused memory.
        fused: Convolutions add to an existing buffer (oneDNN) instead of returning a new one.
        casts: The weights have another dtype than the activations.
    """

    batch: int
    itemsize: int
    single_frame: bool
    on_cpu: bool
    fused: bool
    casts: bool


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
    """One video without its data.

    Args:
        setting: Conditions of the stream.
        part_bytes: Size of a part, as for `advance` of the executor.
        kept_bytes: Bytes of the tails.
    """

    def __init__(self, setting: Setting, part_bytes: int, kept_bytes: int) -> None:
        self._ledger = _Ledger(setting, kept_bytes)
        self._setting, self._part_bytes = setting, part_bytes
        self._piece: _Block | None = None  # a caller frees a piece when it has the next one

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once."""
        return self._ledger.peak

    def whole_frames(self, chains: SpecChains, shape: Shape) -> None:
        """Run `Executor.advance` on a chunk of `shape` through `chains`."""
        x = self._ledger.new(shape)
        self._piece = self._advance(chains, x, shape, collects=False).last

    def tiled_decode(
        self, whole: SpecChains, tile: SpecChains, shape: Shape, leaving: Shape
    ) -> None:
        """Run `TiledDecode.advance` without a buffer of the caller.

        Args:
            whole: The layers on whole frames.
            tile: The layers of the largest tile.
            shape: Shape of the input.
            leaving: Shape of the frames.
        """
        x = self._ledger.new(shape)
        runs = self._advance(whole, x, shape, collects=True)
        chunk = self._ledger.new(leaving)
        self._advance(tile, runs.last, runs.shape, collects=False)
        self._piece = chunk

    def tiled_encode(
        self, tile: SpecChains, whole: SpecChains, shape: Shape, between: Shape
    ) -> None:
        """Run `TiledEncode.advance`.

        Args:
            tile: The layers of the largest tile.
            whole: The layers on whole frames.
            shape: Shape of the input.
            between: Shape between the two.
        """
        x = self._ledger.new(shape)
        made = self._advance(tile, x, shape, collects=True), self._ledger.new(between)
        self._piece = self._advance(whole, made[1], between, collects=False).last

    def _advance(self, chains: SpecChains, x: "_Block", shape: Shape, *, collects: bool) -> "_Runs":
        """Run `advance` of the executor."""
        runs = self._run(chains[0], x, shape, collects=collects or len(chains) > 1)
        for number, (head, *tail) in enumerate(chains[1:], 2):
            shape = runs.joined
            joined = runs.last if runs.count == 1 else self._ledger.new(shape)
            del runs
            z, out = self._through(head, joined, shape)
            runs = self._run(tail, z, out, collects=collects or number < len(chains))
            del z
        return runs

    def _run(
        self, layers: Sequence[LayerSpec | CropSpec], x: "_Block", shape: Shape, *, collects: bool
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
                runs = self._run(layers[index:], z, run, collects=collects)
                return _Runs(runs.last, runs.shape, count * runs.count, before + runs.before)
            y, shape = self._through(layer, y, shape)
        return _Runs(y, shape, 1, [])

    def _through(
        self, layer: LayerSpec | CropSpec, x: "_Block", shape: Shape
    ) -> "tuple[_Block, Shape]":
        after = layer.after(shape, single_frame=self._setting.single_frame)
        if isinstance(layer, CropSpec):
            return self._ledger.new(after), after
        side = None
        if layer.holds == "result":
            side = self._ledger.new(after)
        elif layer.holds == "input":
            # A block with its own shortcut does not write into its input.
            side = x if layer.parts[0].mixed else self._ledger.new(shape)
        y = x
        for part in layer.parts:
            last = layer.holds == "result" and part is layer.parts[-1]
            y = self._part(part, y, shape, side if last and part.down > 1 else None)
            shape = part.after(shape, single_frame=self._setting.single_frame)
        if layer.holds == "result" and layer.parts[-1].down == 1:
            y = self._ledger.new(after)
        return y, after

    def _part(
        self, part: PartSpec, x: "_Block", shape: Shape, residual: "_Block | None"
    ) -> "_Block":
        if not part.products:
            return self._attention(part, shape)
        if part.up > 1:
            return self._up(part, shape)
        if part.down > 1:
            return self._down(part, shape, residual)
        return self._same(part, x, shape)

    def _attention(self, part: PartSpec, shape: Shape) -> "_Block":
        """Allocate queries, keys and values, the attended values, and the result."""
        self._ledger.scratch(shape)
        *mixed, _ = part.mixed
        made = [self._ledger.new(shape.of(channels)) for channels in mixed]
        made.append(self._ledger.new(shape))
        if not self._setting.on_cpu and shape.channels > _FUSED_HEAD:
            rows = self._setting.batch * shape.frames * (shape.height * shape.width) ** 2
            scores = _SCORE_BYTES * min(rows, _SCORES)
            self._ledger.take(scores)
            self._ledger.take(-scores)
        return self._ledger.new(shape)

    def _same(self, part: PartSpec, x: "_Block", shape: Shape) -> "_Block":
        """Run one convolution, or two with a residual."""
        *before, last = part.products
        made = []
        for product in before:
            made.append(self._product(part, product, shape))
            shape = shape.of(product.outputs)
        if before:
            made.append(self._ledger.new(shape) if part.mixed else x)
        return self._product(part, last, shape, made[-1] if before else None)

    def _down(self, part: PartSpec, shape: Shape, residual: "_Block | None") -> "_Block":
        """Downsample in space, and in time if there is a second convolution."""
        first, *rest = part.products
        rest = [] if self._setting.single_frame else rest
        y = self._product(part, first, shape, None if rest else residual, part.down)
        if not rest:
            return y
        return self._product(part, rest[0], part.after(shape, single_frame=True), residual)

    def _up(self, part: PartSpec, shape: Shape) -> "_Block":
        """Upsample in time if there is a first convolution, then in space."""
        *first, last = part.products
        made = []
        for product in [] if self._setting.single_frame else first:
            made.append(self._product(part, product, shape))
            shape = shape.lasting(shape.frames * part.times)
            self._ledger.scratch(shape)
        if last.context and not self._setting.single_frame:
            self._ledger.scratch(shape.lasting(shape.frames + last.context))
        height, width = shape.height + 1, shape.width + 1
        grid = Shape(4 * last.outputs, shape.frames, height, width)
        made.append(self._made(grid))
        times = 1 if self._setting.single_frame else last.times
        y = self._ledger.result(
            Shape(last.outputs, shape.frames * times, 2 * shape.height, 2 * shape.width)
        )
        made += [self._made(grid) for _ in range(times - 1)]
        return y

    def _product(
        self,
        part: PartSpec,
        product: ConvSpec,
        shape: Shape,
        residual: "_Block | None" = None,
        down: int = 1,
    ) -> "_Block":
        """Run `CausalConv3d.forward`."""
        setting, ledger = self._setting, self._ledger
        window = shape.lasting(shape.frames + (0 if setting.single_frame else product.context))
        frames = shape.frames if setting.single_frame else shape.frames // product.stride
        out = Shape(product.outputs, frames, shape.height // down, shape.width // down)
        rows = self._band(window) if part.banded else shape.height
        if rows < shape.height:
            ledger.scratch(window.sized(rows + 2, window.width))
            y = residual or ledger.result(out)
            tail = Shape(shape.channels, product.context, rows, shape.width)
            _ = ledger.new(tail), self._made(out.sized(rows, out.width))
            return y
        if product.windowed:
            ledger.scratch(window)
        # Copies in oneDNN's order; the weight of a first frame, which has fewer taps, also in
        # PyTorch's.
        arranged = 2 * product.rearranged_first if setting.single_frame else product.rearranged
        copies = arranged * setting.itemsize * (1 + setting.casts) * setting.on_cpu
        ledger.take(copies)
        made = arranged or not setting.fused
        y = ledger.new(out) if made else residual or ledger.result(out)
        ledger.take(-copies)
        return y

    def _band(self, window: Shape) -> int:
        """Return the rows of a band as `row_bands.rows_of`."""
        row = self._ledger.nbytes(window.sized(1, window.width))
        if row * window.height <= WORTH_IT * self._part_bytes:
            return window.height
        return min(window.height, max(1, self._part_bytes // row - 2))

    def _made(self, shape: Shape) -> "_Block":
        """Allocate the result of a convolution."""
        return self._ledger.result(shape) if self._setting.fused else self._ledger.new(shape)


class _Runs(NamedTuple):
    """The runs of an iterator: the last one, their number, and those before it."""

    last: "_Block"
    shape: Shape
    count: int
    before: "list[_Block]"

    @property
    def joined(self) -> Shape:
        """The shape of all runs together."""
        return self.shape.lasting(self.count * self.shape.frames)


class _Block:
    """Allocated memory, until no variable refers to it."""

    __slots__ = ("_give_back", "_nbytes")

    def __init__(self, nbytes: int, give_back: Callable[[int], object]) -> None:
        self._nbytes, self._give_back = nbytes, give_back

    def __del__(self) -> None:
        self._give_back(self._nbytes)


class _Ledger:
    """The allocated memory, and its maximum so far.

    Args:
        setting: Conditions of the stream.
        kept_bytes: Bytes that are always allocated.
    """

    def __init__(self, setting: Setting, kept_bytes: int) -> None:
        self.peak = self._live = kept_bytes
        self._setting = setting
        self._scratch = 0
        self._free: list[int] = []  # sizes of the blocks that `Workspace.reused` can return again

    def take(self, nbytes: int) -> None:
        """Record an allocation of `nbytes`; a negative number is a release."""
        self._live += nbytes
        self.peak = max(self.peak, self._live)

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of an activation of `shape`."""
        return shape.numel * self._setting.batch * self._setting.itemsize

    def new(self, shape: Shape, count: int = 1) -> _Block:
        """Allocate `count` activations of `shape`."""
        nbytes = count * self.nbytes(shape)
        self.take(nbytes)
        return _Block(-nbytes, self.take)

    def result(self, shape: Shape) -> _Block:
        """Allocate memory as `Workspace.reused` does, or new memory."""
        nbytes = self.nbytes(shape)
        if not self._setting.on_cpu or nbytes < KEPT_BYTES:
            return self.new(shape)
        size = min((size for size in self._free if nbytes <= size <= WASTE * nbytes), default=0)
        if size:
            self._free.remove(size)
        else:
            self.take(nbytes - sum(self._free))
            self._free.clear()
        return _Block(size or nbytes, self._free.append)

    def scratch(self, shape: Shape) -> None:
        """Allocate memory as `Workspace.scratch` does."""
        nbytes = self.nbytes(shape)
        self.take(max(0, nbytes - self._scratch))
        self._scratch = max(nbytes, self._scratch)
