"""A stream without its numbers: what it takes of memory is noted, and nothing is computed.

It goes through the layers as the executor does, and notes what each makes and when that is let
go, with the rules of the real code: who changes what a layer holds changes it here as well. What is
measured of processes beside it is in `tests/vae/planning/test_plan.py`.
"""

from collections.abc import Sequence
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
        lone: The video is a single frame.
        on_cpu: It runs on a CPU, where large results lie in kept memory.
        fused: Convolutions add to what is there (oneDNN) instead of making a result of their own.
        casts: The weights are of another dtype than the activations.
    """

    batch: int
    itemsize: int
    lone: bool
    on_cpu: bool
    fused: bool
    casts: bool


class CropSpec(NamedTuple):
    """What cuts the halo of a tile off: to a height and a width."""

    height: int
    width: int


SpecChains = list[list[LayerSpec | CropSpec]]


class DryRun:
    """One video on its way.

    What a method returns is held for its caller, and what it is given is held by its caller.

    Args:
        setting: Where it runs.
        part_bytes: As for `advance` of the executor.
        kept_bytes: What the layers remember.
    """

    def __init__(self, setting: Setting, part_bytes: int, kept_bytes: int) -> None:
        self._ledger = _Ledger(setting, kept_bytes)
        self._setting, self._part_bytes = setting, part_bytes
        self._piece: _Block | None = None
        self._tile_piece: _Block | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return self._ledger.peak

    def whole_frames(self, chains: SpecChains, shape: Shape) -> None:
        """`WholeFrames.advance`."""
        x = self._ledger.new(shape)
        runs = self._advance(chains, x, shape, collects=False)
        self._ledger.free(x)
        self._piece = self._given(self._piece, runs.last)

    def tiled_decode(
        self, whole: SpecChains, tile: SpecChains, shape: Shape, leaving: Shape
    ) -> None:
        """`TiledDecode.advance`, without memory of the caller's for the frames."""
        x = self._ledger.new(shape)
        runs = self._advance(whole, x, shape, collects=True)
        chunk = self._ledger.new(leaving)
        frames = self._advance(tile, runs.last, runs.shape, collects=False)
        self._tile_piece = self._given(self._tile_piece, frames.last)
        self._ledger.free(x, runs.last, *runs.before)
        self._tile_piece = self._given(self._tile_piece, None)
        self._piece = self._given(self._piece, chunk)

    def tiled_encode(
        self, tile: SpecChains, whole: SpecChains, shape: Shape, between: Shape
    ) -> None:
        """`TiledEncode.advance`."""
        x = self._ledger.new(shape)
        runs = self._advance(tile, x, shape, collects=True)
        frames = self._ledger.new(between)
        latents = self._advance(whole, frames, between, collects=False)
        self._ledger.free(x, frames, runs.last, *runs.before)
        self._piece = self._given(self._piece, latents.last)

    def _given(self, before: "_Block | None", piece: "_Block | None") -> "_Block | None":
        """Who takes pieces lets go of one when the next is there."""
        if before is not None:
            self._ledger.free(before)
        return piece

    def _advance(self, chains: SpecChains, x: "_Block", shape: Shape, *, collects: bool) -> "_Runs":
        """`advance` of the executor."""
        ledger = self._ledger
        runs = self._run(chains[0], x, shape, collects=collects or len(chains) > 1)
        joined = None
        for number, (head, *tail) in enumerate(chains[1:], 2):
            y = runs.last if runs.count == 1 else ledger.new(runs.joined)
            if runs.count > 1:
                ledger.free(runs.last, *runs.before)
            joined = self._given(joined, y)
            z, out = self._through(head, y, runs.joined)
            runs = self._run(tail, z, out, collects=collects or number < len(chains))
            ledger.free(z)
        self._given(joined, None)
        return runs

    def _run(
        self, layers: Sequence[LayerSpec | CropSpec], x: "_Block", shape: Shape, *, collects: bool
    ) -> "_Runs":
        """`advance`: of the parts, the last; the others do the same with less collected."""
        ledger = self._ledger
        y = ledger.hold(x)
        for index, layer in enumerate(layers):
            growth = 1 if isinstance(layer, CropSpec) else layer.growth
            part = largest_part(shape.frames, ledger.nbytes(shape) * growth, self._part_bytes)
            if part < shape.frames:
                run = shape.lasting(part)
                # The frames of one video lie one after the other, so that some are no copy.
                z = ledger.new(run) if self._setting.batch > 1 else ledger.hold(y)
                count, before = shape.frames // part, []
                if collects:
                    end = run
                    for each in layers[index:]:
                        end = self._after(each, end)
                    before.append(ledger.new(end, count - 1))
                runs = self._run(layers[index:], z, run, collects=collects)
                ledger.free(y, z)
                return _Runs(runs.last, runs.shape, count * runs.count, before + runs.before)
            z, shape = self._through(layer, y, shape)
            ledger.free(y)
            y = z
        return _Runs(y, shape, 1, [])

    def _after(self, layer: LayerSpec | CropSpec, shape: Shape) -> Shape:
        if isinstance(layer, CropSpec):
            return shape.sized(*layer)
        return layer.after(shape, lone=self._setting.lone)

    def _through(
        self, layer: LayerSpec | CropSpec, x: "_Block", shape: Shape
    ) -> "tuple[_Block, Shape]":
        after = self._after(layer, shape)
        if isinstance(layer, CropSpec):
            return self._ledger.new(after), after
        side = None
        if layer.holds == "result":
            side = self._ledger.new(after)
        elif layer.holds == "input":
            # A block with a shortcut of its own leaves its input alone.
            alone = layer.parts[0].mixed
            side = self._ledger.hold(x) if alone else self._ledger.new(shape)
        y = self._ledger.hold(x)
        for part in layer.parts:
            last = layer.holds == "result" and part is layer.parts[-1]
            z = self._part(part, y, shape, side if last and part.down > 1 else None)
            shape = part.after(shape, lone=self._setting.lone)
            self._ledger.free(y)
            y = z
        if layer.holds == "result" and layer.parts[-1].down == 1:
            y = self._given(y, self._ledger.new(after)) or y
        self._given(side, None)
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
        y = self._ledger.new(shape)
        self._ledger.free(*made)
        return y

    def _same(self, part: PartSpec, x: "_Block", shape: Shape) -> "_Block":
        """A convolution, or two with what they are added to."""
        *before, last = part.products
        made = []
        for product in before:
            made.append(self._product(part, product, shape))
            shape = shape.of(product.outputs)
        if before:
            made.append(self._ledger.new(shape) if part.mixed else self._ledger.hold(x))
        y = self._product(part, last, shape, made[-1] if before else None)
        self._ledger.free(*made)
        return y

    def _down(self, part: PartSpec, shape: Shape, residual: "_Block | None") -> "_Block":
        """In space, and in time if there is a second convolution."""
        first, *rest = part.products
        rest = [] if self._setting.lone else rest
        y = self._product(part, first, shape, None if rest else residual, part.down)
        if not rest:
            return y
        small = part.after(shape, lone=True)
        z = self._product(part, rest[0], small, residual)
        self._ledger.free(y)
        return z

    def _up(self, part: PartSpec, shape: Shape) -> "_Block":
        """In time if there is a first convolution, then in space."""
        *first, last = part.products
        made = []
        for product in [] if self._setting.lone else first:
            made.append(self._product(part, product, shape))
            shape = shape.lasting(shape.frames * part.times)
            self._ledger.scratch(shape)
        if last.context and not self._setting.lone:
            self._ledger.scratch(shape.lasting(shape.frames + last.context))
        height, width = shape.height + 1, shape.width + 1
        grid = Shape(4 * last.outputs, shape.frames, height, width)
        made.append(self._made(grid))
        times = 1 if self._setting.lone else last.times
        y = self._ledger.result(
            Shape(last.outputs, shape.frames * times, 2 * shape.height, 2 * shape.width)
        )
        made += [self._made(grid) for _ in range(times - 1)]
        self._ledger.free(*made)
        return y

    def _product(
        self,
        part: PartSpec,
        product: ConvSpec,
        shape: Shape,
        residual: "_Block | None" = None,
        down: int = 1,
    ) -> "_Block":
        """`Conv._product`, with the window before it."""
        setting, ledger = self._setting, self._ledger
        window = shape.lasting(shape.frames + (0 if setting.lone else product.context))
        frames = shape.frames if setting.lone else shape.frames // product.stride
        out = Shape(product.outputs, frames, shape.height // down, shape.width // down)
        rows = self._band(window) if part.banded else shape.height
        if rows < shape.height:
            ledger.scratch(window.sized(rows + 2, window.width))
            y = ledger.hold(residual) if residual else ledger.result(out)
            tail = Shape(shape.channels, product.context, rows, shape.width)
            ledger.free(ledger.new(tail), self._made(out.sized(rows, out.width)))
            return y
        if product.windowed:
            ledger.scratch(window)
        # In oneDNN's order; that of a first frame, which are not all taps, in PyTorch's as well.
        arranged = 2 * product.rearranged_first if setting.lone else product.rearranged
        copies = arranged * setting.itemsize * (1 + setting.casts) * setting.on_cpu
        ledger.take(copies)
        if arranged or not setting.fused:
            y = ledger.new(out)
        else:
            y = ledger.hold(residual) if residual else ledger.result(out)
        ledger.take(-copies)
        return y

    def _band(self, window: Shape) -> int:
        """`bands.rows_of`."""
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
    """Memory that something lies in, and how many hold it."""

    __slots__ = ("held", "kept", "nbytes")

    def __init__(self, nbytes: int, *, kept: bool = False) -> None:
        self.nbytes, self.kept, self.held = nbytes, kept, 1


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
        self._blocks: list[_Block] = []

    def take(self, nbytes: int) -> None:
        """Note what is taken; below zero, what is given back."""
        self._live += nbytes
        self.peak = max(self.peak, self._live)

    def nbytes(self, shape: Shape) -> int:
        """Of an activation."""
        return shape.numel * self._setting.batch * self._setting.itemsize

    def new(self, shape: Shape, count: int = 1) -> _Block:
        """Memory that is asked for; of so many such shapes."""
        block = _Block(count * self.nbytes(shape))
        self.take(block.nbytes)
        return block

    def result(self, shape: Shape) -> _Block:
        """Memory as `Workspace.reused` lends it, or new."""
        nbytes = self.nbytes(shape)
        if not self._setting.on_cpu or nbytes < KEPT_BYTES:
            return self.new(shape)
        free = [block for block in self._blocks if not block.held]
        fitting = [block for block in free if nbytes <= block.nbytes <= WASTE * nbytes]
        if not fitting:
            self._blocks = [block for block in self._blocks if block.held]
            self.take(nbytes - sum(block.nbytes for block in free))
            fitting = [_Block(nbytes, kept=True)]
            self._blocks += fitting
        block = min(fitting, key=lambda block: block.nbytes)
        block.held = 1
        return block

    def scratch(self, shape: Shape) -> None:
        """Memory as `Workspace.scratch` lends it."""
        nbytes = self.nbytes(shape)
        self.take(max(0, nbytes - self._scratch))
        self._scratch = max(nbytes, self._scratch)

    def hold(self, block: _Block) -> _Block:
        """One more holds it."""
        block.held += 1
        return block

    def free(self, *blocks: _Block) -> None:
        """One less holds each."""
        for block in blocks:
            block.held -= 1
            if not block.held and not block.kept:
                self.take(-block.nbytes)
