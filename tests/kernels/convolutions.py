"""Calls of the convolutions in memory surrounded by NaN, and their formula in float64."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from random import Random

import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import ConvWeight, use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import Poisoned, random, video

# Taps and strides.
KERNELS = {
    "3x3x3": ((3, 3, 3), (1, 1, 1)),
    "3x1x1": ((3, 1, 1), (1, 1, 1)),
    "1x3x3": ((1, 3, 3), (1, 1, 1)),
    "1x1x1": ((1, 1, 1), (1, 1, 1)),
    "3x3x3 by 2": ((3, 3, 3), (2, 2, 2)),
    "3x1x1 by 2": ((3, 1, 1), (2, 1, 1)),
    "2x2": ((2, 2), (1, 1, 1)),
    "3x3": ((3, 3), (1, 1, 1)),
    "3x3 by 2": ((3, 3), (1, 2, 2)),
    "1x1": ((1, 1), (1, 1, 1)),
}

# Candidates that run on the CPU; "any" is the usual order.
CANDIDATES = ("reference", "aten", "sliced", "any")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Input and output channels: of a picture, of a patch, one, and of a network.
_CHANNELS = (3, 16), (16, 3), (12, 12), (12, 96), (96, 3), (96, 96), (16, 1), (1, 12), (20, 33)

# Rows and columns; few, odd and even, and whole groups of 4 columns.
_SIZES = ((3, 3), (3, 5), (5, 7), (9, 4), (4, 12), (8, 3))

_PADDINGS = ((0, 0), (1, 1), (1, 0))

TERMS = ("bias", "residual", "residual_bias", "gamma")

# Where a result is written.
TARGETS = ("new memory", "a slice of frames", "the residual")

# Every set of terms with every target that it has.
CALLS = tuple(
    (frozenset(terms), target)
    for chosen in product((False, True), repeat=4)
    if (terms := [term for term, has in zip(TERMS, chosen, strict=True) if has]) is not None
    for target in TARGETS
    if target != "the residual" or "residual" in terms
)


def using(candidate):
    return nullcontext() if candidate == "any" else use_backend(candidate)


def refuses(candidate, taps):
    return candidate == "sliced" and len(taps) == 2


def kept(weight, derived=None):
    """Return a weight that keeps its layouts; it adds to the list `derived` when it is derived."""

    def derive():
        if derived is not None:
            derived.append(weight)
        order = torch.channels_last if weight.ndim == 4 else torch.channels_last_3d
        return weight.contiguous(memory_format=order)

    return ConvWeight(weight.shape, weight.dtype, weight.device, derive)


def taps_of(outputs, inputs, *kernel, dtype=torch.float32, seed=1):
    """Return a weight that keeps the magnitude of its input."""
    weight = random(outputs, inputs, *kernel, seed=seed)
    return (weight / weight[0].numel() ** 0.5).to(dtype)


class Placed:
    def __init__(self, shape, dtype, pick, seed):
        batch, channels, frames, height, width = shape
        spare, offset = pick((0, 1)), pick((64, 1))
        size = batch, frames + 2 * spare, height, width, channels
        self._buffer = Poisoned(*size, dtype=dtype, offset=offset)
        self.view = self._buffer.memory.movedim(-1, 1)[:, :, spare : spare + frames]
        if seed is not None:
            self.view.copy_(video(*shape, dtype=dtype, seed=seed))
        self.before = self.view.clone()

    def take(self):
        return self._buffer.take(self.view)


@dataclass
class Example:
    """A call of a convolution, drawn from all that callers pass."""

    inputs: dict[str, Placed]  # videos by argument name
    weight: torch.Tensor
    options: dict[str, object]  # all other arguments
    keeps: bool  # whether the weight keeps its layouts
    out: Placed | None  # memory for the result; None: new memory, or the residual's
    in_place: bool  # whether the result replaces the residual

    def __str__(self):
        return f"{tuple(self.weight.shape)} {self.weight.dtype} {sorted(self.options)} {self.keeps}"

    def run(self):
        """Run the call; fail if it writes anything but its result, which is returned."""
        inputs = {name: placed.view for name, placed in self.inputs.items()}
        out = inputs["residual"] if self.in_place else self.out.view if self.out else None
        weight = kept(self.weight) if self.keeps else self.weight
        before = self.weight.clone()
        result = kernels.conv3d(weight=weight, out=out, **inputs, **self.options)
        if out is None:
            assert result.movedim(1, -1).is_contiguous(), self
        else:
            assert result is out, self
            result = (self.inputs["residual"] if self.in_place else self.out).take()
        assert result.dtype == self.weight.dtype, self
        assert torch.equal(self.weight, before), self
        for name, placed in self.inputs.items():
            if name != "residual" or not self.in_place:
                assert torch.equal(placed.take(), placed.before), f"{self}: {name}"
        return result

    def check(self, result):
        inputs = {name: placed.before for name, placed in self.inputs.items()}
        value, error = formulas.conv3d(weight=self.weight, **inputs, **self.options)
        if result.dtype == torch.float64:
            error *= 2  # the formula is computed in float64 too
        formulas.check(result, value, error, str(self))


def build(
    channels, taps, stride, padding, lengths, size, terms, dtype, *, pick, batch=1,
    target="new memory", keeps=True, shaped=lambda values: values,
):  # fmt: skip
    """Return a call; `pick` chooses spare frames, of (0, 1), and an offset, of (64, 1)."""
    (inputs, outputs), (known, frames) = channels, lengths

    def placed(channels, frames, size, seed):
        return Placed((batch, channels, frames, *size), dtype, pick, seed)

    videos = {"x": placed(inputs, frames, size, 2)}
    if known:
        videos["tail"] = placed(inputs, known, size, 3)
    frames, *size = (
        (length + 2 * pad - count) // step + 1
        for length, pad, count, step in zip(
            (known + frames, *size), (0, *padding), (1, *taps)[-3:], stride, strict=True
        )
    )
    if "residual" in terms or target == "the residual":
        videos["residual"] = placed(outputs, frames, size, 4)
    numbers = zip(("bias", "residual_bias", "gamma"), random(3, outputs, seed=5), strict=True)
    options = {name: shaped(values) for name, values in numbers if name in terms}
    options |= {"stride": stride, "padding": padding}
    out = placed(outputs, frames, size, None) if target == "a slice of frames" else None
    weight = taps_of(outputs, inputs, *taps, dtype=dtype)
    return Example(videos, weight, options, keeps, out, target == "the residual")


def example(kernel, terms, target, seed):
    draw = Random(f"{kernel} {sorted(terms)} {target} {seed}")
    taps, stride = KERNELS[kernel]
    flat, pick, dtype = len(taps) == 2, draw.choice, draw.choice(DTYPES)
    batch, known = pick((1, 2)), 0 if flat else pick((0, 1, 2, 4))
    frames = pick([n for n in range(1, 6) if flat or n + known >= taps[0]])
    narrow = pick((dtype, torch.float32))
    return build(
        pick(_CHANNELS), taps, stride, pick(_PADDINGS), (known, frames), pick(_SIZES), terms, dtype,
        batch=batch, pick=pick, target=target, keeps=pick((False, True)),
        shaped=lambda values: values.to(narrow).view(pick([(-1,), (1, -1, 1, 1)])),
    )  # fmt: skip
