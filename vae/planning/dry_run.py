"""A stream without its numbers: what it takes of memory is noted, and nothing is computed.

It goes through the layers as the executor does, and notes what each makes, with the rules of the
real code: who changes what a layer holds changes it here as well. A block is given back when the
last variable that refers to it is gone, as the memory of a tensor is. What is measured of processes
beside it is in `tests/vae/planning/test_plan.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layers.frame_runs import largest_part
from ..layers.row_bands import WORTH_IT
from ..layers.workspace import KEPT_BYTES, WASTE
from .layer_specs import ConvSpec, LayerSpec, PartSpec, Shape

# Attention on a GPU, where it may be in blocks: from what size of a head on, how many scores are
# there at once, and their bytes and those of their softmax (kernels/reference/attention.py).
_FUSED_HEAD = 256
_SCORES = 1 << 26
_SCORE_BYTES = 8


@dataclass(frozen=True)
class Setting:
    """Where a stream runs.

    Attributes:
        batch: Videos at once.
        itemsize: Bytes of a number.
        single_frame: The video is a single frame.
        on_cpu: It runs on a CPU, where large results lie in kept memory.
        fused: Convolutions add to what is there (oneDNN) instead of making a result of their own.
        casts: The weights are of another dtype than the activations.
    """

    batch: int
    itemsize: int
    single_frame: bool
    on_cpu: bool
    fused: bool
    casts: bool


class CropSpec(NamedTuple):
    """What cuts the halo of a tile off, as a `LayerSpec`: to a height and a width."""

    height: int
    width: int
    growth = 1

    def after(self, shape: Shape, *, single_frame: bool) -> Shape:
        """What comes out."""
        return shape.sized(*self)


SpecChains = list[list[LayerSpec | CropSpec]]


class DryRun:
    """One video on its way.

    Args:
        setting: Where it runs.
        part_bytes: As for `advance` of the executor.
        kept_bytes: What the layers remember.
    """

    def __init__(self, setting: Setting, part_bytes: int, kept_bytes: int) -> None:
        self._ledger = _Ledger(setting, kept_bytes)
        self._setting, self._part_bytes = setting, part_bytes
        self._piece: _Block | None = None  # who takes pieces lets go of one when the next is there

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return self._ledger.peak

    def whole_frames(self, chains: SpecChains, shape: Shape) -> None:
        """`Executor.advance`."""
        x = self._ledger.new(shape)
        self._piece = self._advance(chains, x, shape, collects=False).last

    def tiled_decode(
        self, whole: SpecChains, tile: SpecChains, shape: Shape, leaving: Shape
    ) -> None:
        """`TiledDecode.advance`, without memory of the caller's for the frames."""
        x = self._ledger.new(shape)
        runs = self._advance(whole, x, shape, collects=True)
        chunk = self._ledger.new(leaving)
        self._advance(tile, runs.last, runs.shape, collects=False)
        self._piece = chunk

    def tiled_encode(
        self, tile: SpecChains, whole: SpecChains, shape: Shape, between: Shape
    ) -> None:
        """`TiledEncode.advance`."""
        x = self._ledger.new(shape)
        made = self._advance(tile, x, shape, collects=True), self._ledger.new(between)
        self._piece = self._advance(whole, made[1], between, collects=False).last

    def _advance(self, chains: SpecChains, x: "_Block", shape: Shape, *, collects: bool) -> "_Runs":
        """`advance` of the executor."""
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
        """`advance`: of the parts, the last; the others do the same with less collected."""
        ledger, single_frame = self._ledger, self._setting.single_frame
        y = x
        for index, layer in enumerate(layers):
            nbytes = ledger.nbytes(shape) * layer.growth
            part = largest_part(shape.frames, nbytes, self._part_bytes)
            if part < shape.frames:
                run = shape.lasting(part)
                # The frames of one video lie one after the other, so that some are no copy.
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
            # A block with a shortcut of its own leaves its input alone.
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
        """Queries, keys and values, what comes of them, and the result."""
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
        """A convolution, or two with what they are added to."""
        *before, last = part.products
        made = []
        for product in before:
            made.append(self._product(part, product, shape))
            shape = shape.of(product.outputs)
        if before:
            made.append(self._ledger.new(shape) if part.mixed else x)
        return self._product(part, last, shape, made[-1] if before else None)

    def _down(self, part: PartSpec, shape: Shape, residual: "_Block | None") -> "_Block":
        """In space, and in time if there is a second convolution."""
        first, *rest = part.products
        rest = [] if self._setting.single_frame else rest
        y = self._product(part, first, shape, None if rest else residual, part.down)
        if not rest:
            return y
        return self._product(part, rest[0], part.after(shape, single_frame=True), residual)

    def _up(self, part: PartSpec, shape: Shape) -> "_Block":
        """In time if there is a first convolution, then in space."""
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
        """`CausalConv3d.forward`."""
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
        # In oneDNN's order; that of a first frame, which are not all taps, in PyTorch's as well.
        arranged = 2 * product.rearranged_first if setting.single_frame else product.rearranged
        copies = arranged * setting.itemsize * (1 + setting.casts) * setting.on_cpu
        ledger.take(copies)
        made = arranged or not setting.fused
        y = ledger.new(out) if made else residual or ledger.result(out)
        ledger.take(-copies)
        return y

    def _band(self, window: Shape) -> int:
        """`row_bands.rows_of`."""
        row = self._ledger.nbytes(window.sized(1, window.width))
        if row * window.height <= WORTH_IT * self._part_bytes:
            return window.height
        return min(window.height, max(1, self._part_bytes // row - 2))

    def _made(self, shape: Shape) -> "_Block":
        """The result of a convolution."""
        return self._ledger.result(shape) if self._setting.fused else self._ledger.new(shape)


class _Runs(NamedTuple):
    """What an iterator of runs of frames gives: the last, how many there are, those before."""

    last: "_Block"
    shape: Shape
    count: int
    before: "list[_Block]"

    @property
    def joined(self) -> Shape:
        """All of them."""
        return self.shape.lasting(self.count * self.shape.frames)


class _Block:
    """Memory that something lies in, until nothing refers to it."""

    __slots__ = ("_give_back", "_nbytes")

    def __init__(self, nbytes: int, give_back: Callable[[int], object]) -> None:
        self._nbytes, self._give_back = nbytes, give_back

    def __del__(self) -> None:
        self._give_back(self._nbytes)


class _Ledger:
    """Memory that is taken, and the most of it so far.

    Args:
        setting: Where the stream runs.
        kept_bytes: What is there all the time.
    """

    def __init__(self, setting: Setting, kept_bytes: int) -> None:
        self.peak = self._live = kept_bytes
        self._setting = setting
        self._scratch = 0
        self._free: list[int] = []  # sizes of what `Workspace.reused` can lend again

    def take(self, nbytes: int) -> None:
        """Note what is taken; below zero, what is given back."""
        self._live += nbytes
        self.peak = max(self.peak, self._live)

    def nbytes(self, shape: Shape) -> int:
        """Of an activation."""
        return shape.numel * self._setting.batch * self._setting.itemsize

    def new(self, shape: Shape, count: int = 1) -> _Block:
        """Memory that is asked for; of so many such shapes."""
        nbytes = count * self.nbytes(shape)
        self.take(nbytes)
        return _Block(-nbytes, self.take)

    def result(self, shape: Shape) -> _Block:
        """Memory as `Workspace.reused` lends it, or new."""
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
        """Memory as `Workspace.scratch` lends it."""
        nbytes = self.nbytes(shape)
        self.take(max(0, nbytes - self._scratch))
        self._scratch = max(nbytes, self._scratch)
