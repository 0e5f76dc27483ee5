"""The launches of a GPU backend on `meta` tensors, and the bytes that each reads and writes.

The code of the backends runs up to the launch, which is described instead. Bytes are those that
the design of a kernel reads from and writes to memory: a second read within a launch comes from
the cache, and neighbours of a number that is read are in its sector, so they are read too. Both
backends are counted by the same rules, from the arguments of their own launches.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fast_video_vae.tests.kernels.structures import argument

_KERNELS = "fast_video_vae.kernels"
_FILES = {
    "triton": ("rows", "group_norm", "layout", "attention"),
    "cuda": ("rows", "norms", "layout", "attention"),
}

# Added to the addresses of `meta` tensors, which begin at 0: a kernel takes 0 for a missing tensor.
_ADDRESS = 1 << 40

_SIZES = {"float": 4, "bfloat16": 2, "half": 2, "uint8": 1, "uint16": 2}


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
        patches += [(ops, name, lambda *_: None) for name in ("refuse_device", "require")]
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


def of_cuda(
    source: str,
    kernel: str,
    like: Tensor,
    items: int,
    threads: tuple[int, int],
    arguments: bytes,
    **constants: Any,
) -> Traffic:
    """Describe a launch of the CUDA backend from the memory of its argument."""
    del items, threads
    return _CUDA[kernel](argument(source, kernel, arguments), like.element_size(), constants)


def _norm(
    name: str,
    shape: Sequence[int],
    inner: int,
    outer: int,
    known: int,
    sizes: tuple[int, int],
    more: int,
) -> Traffic:
    """Count a norm that writes the frames of a window, in the order of its programs.

    `shape`: videos, new frames and channels. `inner` and `outer`: pixels of a frame, without and
    with its border. `known`: frames of the tail. `sizes`: bytes of a number of the input, and of
    the result and the tail. `more`: bytes of the parameters.
    """
    videos, frames, channels = shape
    read = written = 0  # of the tail and the result
    for frame in range(frames):
        written += outer
        last = frame + known - frames  # in the next tail; negative: not in it
        for old in range(last % frames, last + 1, frames):
            read, written = read + inner, written + outer
            written += inner if old >= frames else 0
        written += inner if last >= 0 else 0
    each, (size, result) = videos * channels, sizes
    read = frames * inner * size + read * result
    return Traffic(name, each * read + more, each * written * result)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _triton_norm(name: str, a: Any, vectors: Sequence[Tensor]) -> Traffic:
    _, frames, videos = a.programs
    wide = a.width + 2 * a.BORDER
    inner = a.width * (a.pixels // wide - 2 * a.BORDER)
    shape, sizes = (videos, frames, a.CHANNELS), (a.x.element_size(), a.out.element_size())
    return _norm(name, shape, inner, a.pixels, a.known, sizes, _nbytes(*vectors, a.codes))


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
    "_write": _triton_group_norm,
    "_sum": _triton_sums,
    "_combine": lambda a: Traffic(
        "combination of group norm", _nbytes(a.partial), _nbytes(a.statistics)
    ),
    "_bias_residual": _triton_bias_residual,
    "_silu_mul": _triton_silu_mul,
    "_merge_phases": _triton_merge,
    "_spread": _triton_spread,
    "_average_down": _triton_average,
    "_flash": lambda a: Traffic("attention", _nbytes(a.q, a.k, a.v), _nbytes(a.out)),
}


def _videos(items: Any) -> int:
    return items.count // (items.parts.by * items.frames.by)


def _numbers(items: Any, packs: int, constants: Any) -> int:
    """Return the numbers of all frames, of which each has some packs."""
    return packs * constants["PACK"] * items.frames.by * _videos(items)


def _vectors(channels: int, size: int, *vectors: Any) -> int:
    return sum(channels * (4 if x.is_float else size) for x in vectors if x.data)


def _cuda_norm(name: str, window: Any, size: int, more: int) -> Traffic:
    shape = _videos(window.items), window.frames, window.channels
    known = window.known if window.tail.data else 0
    inner = window.height * window.width
    return _norm(name, shape, inner, window.pixels, known, (size, size), more)


def _cuda_rms_norm(op: Any, size: int, _: Any) -> Traffic:
    vectors = _vectors(op.window.channels, size, op.gamma, op.bias)
    return _cuda_norm("rms_norm_silu", op.window, size, vectors)


def _cuda_group_norm(op: Any, size: int, _: Any) -> Traffic:
    window = op.window
    statistics = _videos(window.items) * window.frames * 2 * op.groups * 4
    vectors = _vectors(window.channels, size, op.weight, op.bias)
    return _cuda_norm("group_norm_silu", window, size, vectors + statistics)


def _cuda_sums(op: Any, size: int, _: Any) -> Traffic:
    read = _videos(op.items) * op.items.frames.by * op.pixels * op.channels * size
    return Traffic("sums of group norm", read, op.items.count * 2 * op.channels * 4)


def _cuda_combination(op: Any, _: int, __: Any) -> Traffic:
    read = _videos(op.items) * op.items.frames.by * op.chunks * 2 * op.channels * 4
    return Traffic("combination of group norm", read, op.items.count * 2 * 4)


def _cuda_bias_residual(op: Any, size: int, constants: Any) -> Traffic:
    numbers = _numbers(op.items, op.packs, constants) * size
    vectors = _vectors(op.row.by * constants["PACK"], size, op.bias, op.residual_bias)
    return Traffic("bias_residual", numbers * (2 if op.residual.data else 1) + vectors, numbers)


def _cuda_silu_mul(op: Any, size: int, constants: Any) -> Traffic:
    numbers = op.packs * constants["PACK"] * size
    return Traffic("silu_mul", 2 * numbers, numbers)


def _cuda_merge(op: Any, size: int, constants: Any) -> Traffic:
    moved = _numbers(op.items, op.packs, constants) * size
    more = moved // (4 * op.channels) * op.before if op.source.data else 0
    return Traffic("merge_phases", moved + more + _vectors(op.channels, size, op.bias), moved)


def _cuda_spread(op: Any, size: int, constants: Any) -> Traffic:
    numbers = _numbers(op.items, op.count, constants)
    return Traffic("shuffles", numbers * size, numbers * _SIZES[constants["RESULT"]])


def _cuda_average(op: Any, size: int, constants: Any) -> Traffic:
    written = _numbers(op.items, op.count, constants) * size
    frames = op.items.frames.by * op.times.by
    return Traffic("average_down", written * op.group * (frames - op.missing) // frames, written)


def _cuda_softmax(op: Any, size: int, _: Any) -> Traffic:
    numbers = op.rows * op.columns
    return Traffic("softmax", 4 * numbers, size * numbers)


_CUDA: dict[str, Callable[[Any, int, Any], Traffic]] = {
    "norm_pixels": _cuda_rms_norm,
    "write_pixels": _cuda_group_norm,
    "sum_chunks": _cuda_sums,
    "combine_chunks": _cuda_combination,
    "add_terms": _cuda_bias_residual,
    "gate_rows": _cuda_silu_mul,
    "merge_windows": _cuda_merge,
    "move_packs": _cuda_spread,
    "average_blocks": _cuda_average,
    "weigh_rows": _cuda_softmax,
}

DESCRIBED: dict[str, Callable[..., Traffic]] = {"triton": of_triton, "cuda": of_cuda}
