"""Inputs for the ops, poisoned output memory, and the ops and dtypes that each backend supports."""

import functools
import math
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.backends import ORDER, SIGNATURES
from fast_video_vae.tests.kernels.emulator.library import emulated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

# The convolutions have candidates instead of backends; test_convolution.py is about them.
OPS = tuple(op for op in SIGNATURES if "conv" not in op)

# GPU backends that are emulated on the CPU on machines without a GPU, at milliseconds per program.
PLAYED = () if torch.cuda.is_available() else ("triton", "cuda")

# Calls on channels-last memory that a backend must run. It must refuse all others.
SERVED = {
    *product(("reference",), OPS, (*DTYPES, torch.float64)),
    *product(("triton", "cuda", "native"), set(OPS) - {"attention"}, DTYPES),
}


def arguments(op, **given):
    defaults = {"stride": (1, 1, 1), "padding": (0, 0), "tile": 0} if op == "conv3d" else {}
    return [(defaults | given).get(name) for name in SIGNATURES[op]]


def has(backend, op):
    return (backend, op, torch.float32) in SERVED


def serving(*ops):
    return [name for name in ORDER if all(has(name, op) for op in ops)]


@functools.cache
def missing(backend):
    """Return the reason why this machine cannot run a backend; None: it can."""
    if backend == "reference":
        return None
    with use_backend(backend), place(backend):
        try:
            kernels.silu_mul(torch.ones(4, 16), torch.ones(4, 16))
        except kernels.BackendError as error:
            return str(error)
    return None


@contextmanager
def place(backend):
    """Create tensors on the device of a backend: on a GPU, or on the CPU if it is emulated.

    Triton has its own interpreter; `emulator/` runs the CUDA C++ kernels.
    """
    with ExitStack() as stack:
        if backend == "triton":
            stack.enter_context(np.errstate(all="ignore"))  # the interpreter computes in NumPy
        if backend in PLAYED:
            stack.enter_context(emulated() if backend == "cuda" else nullcontext())
        elif backend in ("triton", "cuda"):
            stack.enter_context(torch.device("cuda"))
        yield


def some(backend, examples, count=6):
    """Return all examples; on an emulated GPU, which is slow, about `count` of them."""
    examples = list(examples)
    if backend not in PLAYED:
        return examples
    step = len(examples) // count | 1  # odd: alternating values alternate in the choice too
    return examples[::step]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def video(*shape, dtype=torch.float32, seed=0):
    """Return normal numbers, `[B, C, T, H, W]` in channels-last memory."""
    batch, channels, *pixels = shape
    return random(batch, *pixels, channels, dtype=dtype, seed=seed).movedim(-1, 1)


def poison(dtype):
    if dtype.is_floating_point:
        return math.nan
    return -83 if dtype == torch.int8 else 173


class Poisoned:
    """Dense `memory` filled with NaN, 173 or -83, inside a longer buffer.

    `offset` is the number of elements in front of it; an odd one makes it misaligned.
    """

    def __init__(self, *shape, dtype, offset=64):
        count = math.prod(shape)
        self._buffer = torch.full((offset + count + 64,), poison(dtype), dtype=dtype)
        self.memory = self._buffer[offset : offset + count].view(shape)

    def take(self, view):
        """Return the values of a view of `memory`; fail if anything around it was written."""
        result = view.clone()
        view.fill_(poison(view.dtype))
        # As int32, because uint16 has few ops.
        clean = (
            self._buffer.isnan()
            if view.is_floating_point()
            else self._buffer.int() == poison(view.dtype)
        )
        assert clean.all(), "written outside of out"
        return result


def window(batch, channels, frames, height, width, *, dtype, offset=64):
    """Return a buffer with spare frames on both ends, and the view of the frames between them."""
    buffer = Poisoned(batch, frames + 2, height, width, channels, dtype=dtype, offset=offset)
    return buffer, buffer.memory.movedim(-1, 1)[:, :, 1:-1]


def inputs(op, dtype):
    channels, shape = 24, (1, 24, 3, 6, 5)
    x, numbers = video(*shape, dtype=dtype), random(2, channels, seed=1)
    tail = video(1, channels, 2, 6, 5, dtype=dtype, seed=2)
    rows = random(3, 7, 2 * channels, dtype=dtype, seed=3)
    return {
        "attention": lambda: (random(3, 2, 20, 8, dtype=dtype).unbind(), {}),
        "average_down": lambda: ((video(1, 24, 3, 6, 4, dtype=dtype), 12), {"times": 2, "size": 2}),
        "bias_residual": lambda: ((x, numbers[0], x.flip(2), numbers[1]), {}),
        "frames_to_images": lambda: ((x,), {"patch": 2, "order": "ctwh"}),
        "group_norm_silu": lambda: ((x, numbers[0], numbers[1], 4), {"tail": tail}),
        "group_norm_statistics": lambda: ((x, 4), {}),
        "interleave_time": lambda: ((x, 2), {}),
        "merge_phases": lambda: (
            (x[:, :, :2], video(1, 6, 1, 5, 4, dtype=dtype), 2),
            {"bias": numbers[0, :6]},
        ),
        "pixel_shuffle_3d": lambda: ((x, (2, 2, 2), "hwtc"), {}),
        "rms_norm_silu": lambda: ((x, numbers[0]), {"bias": numbers[1], "tail": tail}),
        "silu_mul": lambda: ((*rows.chunk(2, -1),), {}),
    }[op]()


def refilled(shape, axes, x, offset=0, step=1):
    """Copy `x` into memory with its axes in another order, a step and an offset."""
    sizes = [shape[axis] for axis in axes]
    sizes[-1] *= step
    memory = torch.zeros(offset + torch.Size(sizes).numel(), dtype=x.dtype)
    view = memory[offset:].view(sizes)[..., ::step].permute([axes.index(d) for d in range(5)])
    return view.copy_(x)


# Memory of a video `[B, C, T, H, W]` that is not dense and channels-last.
LAYOUTS = {
    "channels first": lambda x: refilled(x.shape, (0, 1, 2, 3, 4), x),
    "columns before rows": lambda x: refilled(x.shape, (0, 2, 4, 3, 1), x),
    "frames last": lambda x: refilled(x.shape, (0, 1, 3, 4, 2), x),
    "batch inside": lambda x: refilled(x.shape, (2, 3, 4, 0, 1), x),
    "every other channel": lambda x: refilled(x.shape, (0, 2, 3, 4, 1), x, step=2),
    "misaligned": lambda x: refilled(x.shape, (0, 2, 3, 4, 1), x, offset=1),
    "part of wider pixels": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "part of a wider picture": lambda x: torch.cat([x, x], dim=4)[..., x.shape[4] :],
    "every other frame": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
}
