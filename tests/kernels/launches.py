"""The launches of a GPU backend on `meta` tensors, and the bytes that Triton's read and write.

The code of a backend runs up to the launch, which is described instead. Bytes are those that the
design of a kernel reads from and writes to memory: a second read within a launch comes from the
cache, and neighbours of a number that is read are in its sector, so they are read too.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

_KERNELS = "fast_video_vae.kernels"
_FILES = {
    "triton": ("rows", "norms", "layout"),
    "cuda": ("rows", "norms", "attention"),
}

# Added to the addresses of `meta` tensors, which begin at 0: a kernel takes 0 for a missing tensor.
_ADDRESS = 1 << 40


class Traffic(NamedTuple):
    """A launch: its op or a part of it, and the bytes that it reads and writes."""

    name: str
    read: int
    written: int


@contextlib.contextmanager
def recorded(backend: str, launch: Callable[..., None]) -> Iterator[None]:
    """Let a GPU backend accept `meta` tensors, and call `launch` instead of its own."""
    package = f"{_KERNELS}.{backend}_ops"
    modules = [importlib.import_module(f"{package}.{name}") for name in _FILES[backend]]
    patches = [(module, "launch", launch) for module in modules]
    if backend == "triton":
        ops = importlib.import_module(f"{package}.ops")
        patches.append((ops, "refuse_device", lambda *_: None))
    else:
        runtime = importlib.import_module(f"{package}.runtime")
        # The function of the same name hides the module in its package.
        blocks = importlib.import_module(f"{_KERNELS}.reference.attention")
        address = Tensor.data_ptr
        patches += [
            (runtime, "refuse_device", lambda *_: None),
            (Tensor, "data_ptr", lambda x: address(x) + _ADDRESS * x.is_meta),
            *((module, "multiplies_mixed", lambda *_: True) for module in (modules[-1], blocks)),
            (blocks, "_mixed_product", _mixed_product),
        ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def _mixed_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return a product in float32 `[B, N, M]`, which `baddbmm` does not know on `meta`."""
    del scale
    return torch.bmm(a, b, out_dtype=torch.float32)


def of_triton(kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> Traffic:
    """Describe a launch of Triton's backend from its arguments."""
    names = getattr(kernel, "arg_names", ())
    given = SimpleNamespace(programs=grid, **dict(zip(names, args, strict=False)), **constants)
    return _TRITON[kernel.__name__](given)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _triton_norm(name: str, a: Any, vectors: Sequence[Tensor]) -> Traffic:
    """Count a norm that writes the frames of a window, in the order of its programs."""
    _, frames, videos = a.programs
    wide = a.width + 2 * a.BORDER
    inner = a.width * (a.pixels // wide - 2 * a.BORDER)  # pixels of a frame without its border
    read = written = 0  # of the tail and the result
    for frame in range(frames):
        written += a.pixels
        last = frame + a.known - frames  # in the next tail; negative: not in it
        for old in range(last % frames, last + 1, frames):
            read, written = read + inner, written + a.pixels
            written += inner if old >= frames else 0
        written += inner if last >= 0 else 0
    each, size = videos * a.CHANNELS, a.out.element_size()
    read = frames * inner * a.x.element_size() + read * size
    return Traffic(name, each * read + _nbytes(*vectors, a.codes), each * written * size)


def _triton_rms_norm(a: Any) -> Traffic:
    return _triton_norm("rms_norm_silu", a, [a.gamma, *([a.bias] if a.given else ())])


def _triton_group_norm(a: Any) -> Traffic:
    return _triton_norm("group_norm_silu", a, [a.weight, a.bias, a.statistics])


def _triton_sums(a: Any) -> Traffic:
    _, frames, videos = a.programs
    read = videos * frames * a.pixels * a.CHANNELS * a.x.element_size()
    return Traffic("sums of group norm", read, _nbytes(a.partial))


def _triton_bias_residual(a: Any) -> Traffic:
    _, frames, videos = a.programs
    numbers = videos * frames * a.pixels * a.CHANNELS * a.x.element_size()
    vectors = [x for bit, x in ((1, a.bias), (4, a.residual_bias)) if a.given & bit]
    read = numbers * (2 if a.given & 2 else 1)
    return Traffic("bias_residual", read + _nbytes(*vectors), numbers)


def _triton_silu_mul(a: Any) -> Traffic:
    numbers = a.count * a.CHANNELS * a.x.element_size()
    return Traffic("silu_mul", 2 * numbers, numbers)


def _triton_merge(a: Any) -> Traffic:
    lines, frames, videos = a.programs
    pixels = videos * frames * lines // a.parts * a.width
    moved = 4 * pixels * a.CHANNELS * a.grid.element_size()
    more = 0 if a.source is None else pixels * a.BEFORE * a.source.element_size()
    return Traffic("merge_phases", moved + more + _nbytes(a.bias), moved)


def _triton_spread(a: Any) -> Traffic:
    lines, frames, videos = a.programs
    numbers = videos * frames * lines // a.runs * a.HIGH * a.numbers
    return Traffic("shuffles", numbers * a.x.element_size(), numbers * a.out.element_size())


def _triton_average(a: Any) -> Traffic:
    lines, frames, videos = a.programs
    pixels, size = videos * lines // a.parts * a.width, a.x.element_size()
    read = pixels * a.SIZE**2 * a.BEFORE * (frames * a.TIMES - a.missing) * size
    return Traffic("average_down", read, pixels * frames * a.CHANNELS * size)


_TRITON: dict[str, Callable[[Any], Traffic]] = {
    "_rms_norm_silu": _triton_rms_norm,
    "_group_norm_silu": _triton_group_norm,
    "_sum": _triton_sums,
    "_combine": lambda a: Traffic(
        "combination of group norm", _nbytes(a.partial), _nbytes(a.statistics)
    ),
    "_bias_residual": _triton_bias_residual,
    "_silu_mul": _triton_silu_mul,
    "_merge_phases": _triton_merge,
    "_spread": _triton_spread,
    "_average_down": _triton_average,
}
