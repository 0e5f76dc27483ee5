"""Inputs for the ops, memory to write into, and which backend serves what."""

import functools
import math
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import reference, use_backend
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.tests.kernels.emulator.library import emulated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

OPS = tuple(reference.__all__)

# Backends for GPUs that work on the CPU where there is none, in milliseconds for each program.
PLAYED = () if torch.cuda.is_available() else ("triton", "cuda")

CUDA_OPS = (
    "group_norm_silu",
    "group_norm_statistics",
    "rms_norm_silu",
    "silu_mul",
)

# What must be served, for channels-last memory. All else of a backend is a refusal.
SERVED = {
    *product(("reference",), OPS, (*DTYPES, torch.float64)),
    *product(("triton", "native"), set(OPS) - {"attention"}, DTYPES),
    *product(("cuda",), CUDA_OPS, DTYPES),
}


def has(backend, op):
    """Whether a backend has an op."""
    return (backend, op, torch.float32) in SERVED


def serving(*ops):
    """The backends that have all of some ops."""
    return [name for name in ORDER if all(has(name, op) for op in ops)]


@functools.cache
def missing(backend):
    """Why a backend is not there at all on this machine; None: it is."""
    if backend == "reference":
        return None
    with use_backend(backend), place(backend):
        try:
            kernels.silu_mul(torch.ones(4, 16), torch.ones(4, 16))
        except kernels.BackendError as error:
            return str(error)
    return _too_new_numpy() if backend == "triton" else None


def _too_new_numpy():
    """Why Triton's interpreter runs no loops: that of 3.2 with NumPy 2.5; None: it does."""
    with use_backend("triton"), place("triton"):
        try:
            kernels.group_norm_statistics(video(1, 4, 1, 2, 2), 2)
        except kernels.BackendError as error:
            if "only 0-dimensional arrays" in str(error):
                return f"Triton's interpreter does not work with NumPy {np.__version__}"
    return None


@contextmanager
def place(backend):
    """Make tensors where a backend works: on a GPU, or on the CPU in place of one.

    Triton brings an interpreter, and `emulator/` runs the kernels in CUDA C++.
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
    """All of them; where a GPU is played and they take long, about so many, spread evenly."""
    examples = list(examples)
    if backend not in PLAYED:
        return examples
    return examples[:: len(examples) // count | 1]  # odd: what alternates does so in the choice


def random(*shape, dtype=torch.float32, seed=0):
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def video(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, `[B, C, T, H, W]` in channels-last memory."""
    batch, channels, *pixels = shape
    return random(batch, *pixels, channels, dtype=dtype, seed=seed).movedim(-1, 1)


def poison(dtype):
    """What no op ever writes by itself."""
    return math.nan if dtype.is_floating_point else 173


class Poisoned:
    """Dense `memory` full of NaN or 173, inside of a longer buffer.

    An odd `offset`, the elements in front of it, makes it misaligned.
    """

    def __init__(self, *shape, dtype, offset=64):
        count = math.prod(shape)
        self._buffer = torch.full((offset + count + 64,), poison(dtype), dtype=dtype)
        self.memory = self._buffer[offset : offset + count].view(shape)

    def take(self, view):
        """What was written into a view of `memory`; nothing was written around it."""
        result = view.clone()
        view.fill_(poison(view.dtype))
        clean = self._buffer.isnan() if view.is_floating_point() else self._buffer == 173
        assert clean.all(), "written outside of out"
        return result


def window(batch, channels, frames, height, width, *, dtype):
    """A buffer of more frames than are needed, and the view of those that are."""
    buffer = Poisoned(batch, frames + 2, height, width, channels, dtype=dtype)
    return buffer, buffer.memory.movedim(-1, 1)[:, :, 1:-1]


def inputs(op, dtype):
    """A call of every op: its arguments and keywords."""
    channels, shape = 24, (1, 24, 3, 6, 5)
    x, numbers = video(*shape, dtype=dtype), random(2, channels, seed=1)
    tail = video(1, channels, 2, 6, 5, dtype=dtype, seed=2)
    rows = random(3, 7, 2 * channels, dtype=dtype, seed=3)
    return {
        "attention": lambda: (random(3, 2, 20, 8, dtype=dtype).unbind(), {}),
        "average_down": lambda: ((video(1, 24, 3, 6, 4, dtype=dtype), 12), {"times": 2, "size": 2}),
        "bias_residual": lambda: ((x, numbers[0], x.flip(2), numbers[1]), {}),
        "frames_to_images": lambda: ((x,), {"patch": 2, "order": "ctwh"}),
        "group_norm_silu": lambda: (
            (x, numbers[0], numbers[1], 4),
            {"tail": tail},
        ),
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
