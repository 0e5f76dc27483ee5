"""What a layer allocates, reads and writes, measured on the layer itself.

The layers of a network run on `meta` at two sizes and two lengths and play their device. Their
bytes are linear in frames, pixels, and rows and columns, so these runs give them for all sizes and
lengths. Nothing is computed, and nothing here knows what is in a layer.
"""

import copy
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import adds_in_place, new_video, playing
from ..layers.causal_layer import CausalLayer
from ..layers.conv import Conv
from ..layers.conv_weights import keeps_form
from ..layers.inputs.coding import Coding
from ..layers.temporal_cache import TemporalCache
from ..models.base import Network, unwrapped
from ..models.receptive_field import Size, is_encoder
from .byte_counter import ByteCounter, UncountedScratch

# The footprints of published VAEs, made by `tests/tools/footprint_table.py`.
TABLE = Path(__file__).with_name("footprints.json")

# Height and width of the latents, and their number, at which layers are measured.
_SIZES = ((16, 24), (60, 104))
_LATENTS = (1, 4)


class Form(NamedTuple):
    """Bytes of a call: of its pixels, its rows and columns, in each frame or in all together."""

    frame_pixels: float
    frame_sides: float
    pixels: float
    sides: float

    def at(self, pixels: float, sides: float) -> tuple[float, float]:
        """Return the bytes for each frame, and those for any number, of frames of a size."""
        return (
            self.frame_pixels * pixels + self.frame_sides * sides,
            self.pixels * pixels + self.sides * sides,
        )


class Footprint(NamedTuple):
    """The bytes of a layer next to its input, by the frames and the size of that.

    Attributes:
        peak: The most that is allocated at once, the result included, scratch memory not.
        result: The result.
        scratch: Scratch memory, which all layers share.
        largest: The largest tensor.
        moved: What is read and written.
        second: What the call after the first frame of a video allocates in addition.
        tails: What the layer keeps for the next call.
        entering: Bytes of a pixel of its input.
        times: Frames of the result per frame of the input; 1 for a single frame.
        growth: As of the layer.
        scale: As of the layer, as a number.
        pairs: As of the layer.
        replaces: The result is in the memory of the input.
        adds: A convolution adds a residual, whose memory becomes the result in bands of rows.
        banded: It can run in bands of rows.
        head: Channels of its attention; 0: it has none.
        passes: Kernels that it launches.
        copies: What a call on a CPU copies of the weights.
    """

    peak: Form
    result: Form
    scratch: Form
    largest: Form
    moved: Form
    second: Form
    tails: Form
    entering: int
    times: float
    growth: int
    scale: float
    pairs: bool
    replaces: bool
    adds: bool
    banded: bool
    head: int
    passes: int
    copies: int


class _Call(NamedTuple):
    """The bytes of one call, as the forms of a `Footprint`."""

    peak: int
    result: int
    scratch: int
    largest: int
    moved: int
    second: int = 0
    tails: int = 0


class _Sample(NamedTuple):
    """A layer at one size: its calls at two lengths, and what these have shown."""

    size: Size
    lengths: Sequence[int]
    calls: Sequence[_Call]
    entering: int
    times: float
    replaces: bool
    adds: bool
    head: int
    passes: int


class _Video:
    """A video whose layers run on `meta`, one after the other."""

    def __init__(self, dtype: torch.dtype, coded: frozenset[str], *, single_frame: bool) -> None:
        self.counter = ByteCounter()
        self._memory = UncountedScratch(self.counter)
        self._like = torch.empty(0, dtype=dtype, device="meta")
        coding = Coding(coded, self._like.device) if coded else None
        self._cache = TemporalCache(
            single_frame=single_frame, workspace=self._memory, coding=coding
        )

    def samples(
        self, layers: Sequence[CausalLayer], shape: Sequence[int], *, warm: bool
    ) -> list[_Sample]:
        """Run each layer, the first one on `[1, C, t, H, W]`, where `t` is for one latent.

        `warm`: the layers have run before, so that their weights are derived.
        """
        found = []
        for layer in layers:
            sample, y = self._sample(layer, shape, warm=warm)
            found.append(sample)
            shape = y.shape
        return found

    def _sample(
        self, layer: CausalLayer, shape: Sequence[int], *, warm: bool
    ) -> tuple[_Sample, Tensor]:
        """Return what a layer does, and its result for one latent."""
        counter, cache, before = self.counter, self._cache, self._kept
        counter.head, counter.adds, cache.first = 0, False, True
        lengths = [shape[2] * latents for latents in _LATENTS]
        calls, second, single = [], 0, (*shape[:2], 1, *shape[3:])
        if cache.single_frame:
            for _ in range(1 if warm else 2):
                call, y, replaces = self._call(layer, single)
            lengths, calls = [1, 1], [call, call]
        else:
            self._call(layer, single)
            cache.first, after, asks = False, 0, bool(cache.after_first)
            if asks or not warm:
                after = self._call(layer, shape)[0].peak * asks
            long = self._call(layer, (*shape[:2], lengths[1], *shape[3:]))[0]
            call, y, replaces = self._call(layer, shape)
            second, calls = max(0, after - call.peak), [call, long]
        kept = self._kept - before
        calls = [each._replace(second=second, tails=kept) for each in calls]
        entering, times = shape[1] * self._like.element_size(), y.shape[2] / lengths[0]
        seen = entering, times, replaces, counter.adds, counter.head, counter.passes
        return _Sample._make([(shape[3], shape[4]), lengths, calls, *seen]), y

    def _call(self, layer: CausalLayer, shape: Sequence[int]) -> tuple[_Call, Tensor, bool]:
        """Run a layer; return its bytes, its result, and whether that is in its input's memory."""
        counter, before = self.counter, self._kept
        x = new_video(self._like, tuple(shape))
        own = x.untyped_storage()._cdata
        self._memory.largest = counter.moved = counter.passes = counter.largest = 0
        live = counter.peak = counter.live
        y = layer(x, self._cache)
        peak = counter.peak - live - (self._kept - before)
        made = _Call(peak, y.nbytes, self._memory.largest, counter.largest, counter.moved)
        return made, y, y.untyped_storage()._cdata == own

    @property
    def _kept(self) -> int:
        """The bytes of all tails."""
        return sum(tail.nbytes for tail in self._cache.tails.values())


def footprints(
    network: Network,
    device: torch.device,
    dtype: torch.dtype,
    coded: frozenset[str] = frozenset(),
    *,
    single_frame: bool = False,
) -> list[Footprint]:
    """Return the footprints of the layers of a network in order, for a batch of one.

    Those of published VAEs are in a table; others are measured.

    Args:
        network: The network, on any device.
        device: The device that runs it.
        dtype: Dtype of the activations.
        coded: Names of the convolutions that read codes.
        single_frame: The video has one frame.
    """
    table = _table()
    rows = table.get(name_of(network, device, dtype, single_frame=single_frame))
    if rows is None or coded:
        return measured(network, device, dtype, coded, single_frame=single_frame)
    count, known = len(_Call._fields), (table["rows"][row] for row in rows)
    return [Footprint._make([*map(Form._make, row[:count]), *row[count:]]) for row in known]


@functools.cache
def _table() -> dict[str, list[Any]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def name_of(
    network: Network, device: torch.device, dtype: torch.dtype, *, single_frame: bool
) -> str:
    """Return the name in the table: a hash of the weights, and what matters of device and dtype."""
    source = unwrapped(network)
    shapes = [source.__class__.__name__, *(tuple(each.shape) for each in source.parameters())]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    words = [digest, f"{dtype.itemsize} bytes", "single frame" if single_frame else "video"]
    if device.type == "cpu":
        words.append("cpu")
    words += ["sums"] * adds_in_place(device, dtype) + ["cast"] * _casts(network, device, dtype)
    return " ".join(words)


def measured(
    network: Network,
    device: torch.device,
    dtype: torch.dtype,
    coded: frozenset[str] = frozenset(),
    *,
    single_frame: bool = False,
) -> list[Footprint]:
    """Return the `footprints` of a network, by a run of its layers."""
    layers, found = _twin(network, dtype).layers(), []
    convs = [each for layer in layers for each in layer.modules() if isinstance(each, Conv)]
    channels = next(each.shape[1] for each in layers[0].parameters() if each.ndim > 1)
    shrinks = math.prod(float(layer.scale) for layer in layers) if is_encoder(network) else 1
    frames = 1 if single_frame else math.prod(conv.stride for conv in convs)
    for size in _SIZES:
        video = _Video(dtype, coded, single_frame=single_frame)
        height, width = (int(side / shrinks) for side in size)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            playing(device, video.counter.op),
            video.counter,
        ):
            shape = 1, channels, frames, height, width
            found.append(video.samples(layers, shape, warm=bool(found)))
    copied = (1 + _casts(network, device, dtype)) * dtype.itemsize * (device.type == "cpu")
    return [
        _footprint(layer, small, large, copied * _reordered(layer, single_frame=single_frame))
        for layer, small, large in zip(layers, *found, strict=True)
    ]


def _twin(network: Network, dtype: torch.dtype) -> Network:
    """Return a copy of a network on `meta`, without hooks and without values."""
    source, memo = unwrapped(network), dict[int, Any]()
    for each in (*source.parameters(), *source.buffers()):
        kind = dtype if each.is_floating_point() else each.dtype
        bare = torch.empty(each.shape, dtype=kind, device="meta")
        memo[id(each)] = nn.Parameter(bare, requires_grad=False)
    made = copy.deepcopy(source, memo)
    for module in made.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return made


def _footprint(layer: CausalLayer, small: _Sample, large: _Sample, copies: int) -> Footprint:
    """Return the footprint of a layer from its calls at two sizes."""
    sizes = [(size[0] * size[1], size[0] + size[1]) for size in (small.size, large.size)]
    forms = []
    for values in zip(*small.calls, *large.calls, strict=True):  # of a field of all four calls
        lines = []
        for sample, (low, high) in ((small, values[:2]), (large, values[2:])):
            one, four = sample.lengths
            each = 0.0 if one == four else (high - low) / (four - one)
            lines.append((each, low - each * one))
        frame, fixed = (_solved(sizes, pair) for pair in zip(*lines, strict=True))
        forms.append(Form._make([*frame, *fixed]))
    seen = large.entering, large.times, layer.growth, float(layer.scale), layer.pairs
    banded = layer.sees_all and not large.head
    rest = large.replaces, large.adds, banded, large.head, large.passes, copies
    return Footprint._make([*forms, *seen, *rest])


def _solved(sizes: Sequence[Size], values: Sequence[float]) -> tuple[int, int]:
    """Return the bytes of a pixel, and of a row or column, from those at two sizes."""
    (a, b), (c, d) = sizes
    side = (values[1] * a - values[0] * c) / (d * a - b * c)
    return round((values[0] - side * b) / a), round(side)


def _casts(network: Network, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a CPU converts weights in each call."""
    return device.type == "cpu" and next(network.parameters()).dtype != dtype


def _reordered(layer: CausalLayer, *, single_frame: bool) -> int:
    """Return the elements of the largest weight that oneDNN reorders in each call."""
    found = [0]
    for conv in (each for each in layer.modules() if isinstance(each, Conv)):
        numbers, kind = conv.weight.numel(), conv.first_kind if single_frame else "volume"
        if not keeps_form(kind, numbers):
            # The weight of a first frame has fewer taps, which are copied in PyTorch's order too.
            found.append(
                (1 + single_frame) * numbers // (conv.weight.shape[2] ** (kind == "frame"))
            )
    return max(found)
