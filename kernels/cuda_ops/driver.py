"""The driver's functions that load compiled kernels and launch them.

They are called through the driver's C interface (docs.nvidia.com/cuda/cuda-driver-api; HIP has the
same functions). PyTorch makes the context of a device current; a thread that has not used the
device yet has none.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ..devices import is_rocm
from ..errors import Refusal
from .compiler import opened

# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and CU_TENSOR_MAP_L2_PROMOTION_L2_256B.
_SHARED, _PROMOTION = 8, 3

# cuLaunchKernel, cuModuleLoadData and cuTensorMapEncodeTiled in a thread without a context.
_INVALID_CONTEXT = 201


class Boxes(NamedTuple):
    """A tensor of which boxes are loaded; the fastest dimension comes first."""

    address: int  # a multiple of 16
    kind: int  # `CUtensorMapDataType`
    sizes: tuple[int, ...]  # numbers in each dimension
    steps: tuple[int, ...]  # bytes from one to the next in each dimension but the first
    box: tuple[int, ...]  # numbers of a load in each dimension
    swizzle: int  # `CUtensorMapSwizzle`
    device: int  # of the address


class Driver:
    """The library of the driver, NVIDIA's or AMD's (`hip`)."""

    def __init__(self, library: Any, *, hip: bool) -> None:  # noqa: ANN401, a library
        self._hip, self._library = hip, library
        self.exchange = self._function("ThreadExchangeStreamCaptureMode")
        self._launch = self._function("ModuleLaunchKernel" if hip else "LaunchKernel")
        word, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = [pointer, *(word,) * 7, pointer, pointer, pointer]

    def load(self, code: bytes, names: Iterable[str], device: int, shared: int = 0) -> "Module":
        """Load a binary on a device, which is current, for blocks with `shared` bytes of memory."""
        # The functions are looked up at once, because that can load their code, which a captured
        # CUDA graph does not allow.
        module, kernels = ctypes.c_void_p(), {}
        self._run(device, self._function("ModuleLoadData"), ctypes.byref(module), code)
        get = self._function("ModuleGetFunction")
        for name in names:
            kernels[name] = ctypes.c_void_p()
            self._run(device, get, ctypes.byref(kernels[name]), module, name.encode())
            if shared:  # beyond 48 KiB only on request
                grant = self._function("FuncSetAttribute")
                self._run(device, grant, kernels[name], _SHARED, shared)
        return Module(functools.partial(self._run, device, self._launch), kernels, shared)

    def tensor_map(self, of: Boxes) -> bytes:
        """Return the 128 bytes of a `CUtensorMap`, whose loads have zeros outside."""
        # It is made at a multiple of 64 bytes, since CUDA 13 of 128.
        rank, memory = len(of.sizes), ctypes.create_string_buffer(2 * 128)
        skipped = -ctypes.addressof(memory) % 128
        halves = ctypes.c_uint32 * rank
        self._run(
            of.device, self._function("TensorMapEncodeTiled"),
            ctypes.c_void_p(ctypes.addressof(memory) + skipped), of.kind, rank,
            ctypes.c_void_p(of.address), (ctypes.c_uint64 * rank)(*of.sizes),
            (ctypes.c_uint64 * (rank - 1))(*of.steps), halves(*of.box), halves(*[1] * rank),
            0, of.swizzle, _PROMOTION, 0,
        )  # fmt: skip
        return memory.raw[skipped : skipped + 128]

    def _run(self, device: int, function: Any, *arguments: object) -> None:  # noqa: ANN401
        status = function(*arguments)
        if status == _INVALID_CONTEXT and not self._hip:
            # Make the context that PyTorch uses current in this thread.
            context = ctypes.c_void_p()
            self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self._library.cuCtxSetCurrent(context)
            status = function(*arguments)
        if status:
            text, name = ctypes.c_char_p(), "DrvGetErrorString" if self._hip else "GetErrorString"
            self._function(name)(status, ctypes.byref(text))
            message = (text.value or b"unknown error").decode(errors="replace")
            raise RuntimeError(f"the driver returned {status} ({message})")

    def _function(self, name: str) -> Any:  # noqa: ANN401, a function of the library
        return getattr(self._library, ("hip" if self._hip else "cu") + name)


class Module(NamedTuple):
    """Kernels on a device, which `start` launches with `shared` bytes of memory."""

    start: Callable[..., None]
    kernels: Mapping[str, ctypes.c_void_p]
    shared: int

    def launch(
        self, kernel: str, blocks: int, threads: tuple[int, int], arguments: bytes, stream: int
    ) -> None:
        """Launch a kernel, whose argument is one structure; its device is current."""
        memory = ctypes.create_string_buffer(arguments, len(arguments))
        places = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        grid = blocks, 1, 1, *threads, 1
        self.start(self.kernels[kernel], *grid, self.shared, stream, places, None)


@contextmanager
def relaxed_captures(device: torch.device) -> Iterator[None]:
    """Keep the calls of this thread from ending a capture of a CUDA graph in another one."""
    # A capture in PyTorch's mode forbids calls such as an allocation to all threads but those that
    # are relaxed ("CUDA driver API", `cuThreadExchangeStreamCaptureMode`; HIP has the same).
    mode, exchange = ctypes.c_int(_RELAXED), None
    with suppress(Refusal):
        exchange = driver().exchange if device.type == "cuda" else None
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@functools.cache
def driver() -> Driver:
    """Load the driver's library, or refuse."""
    names = _names(torch.version.hip)
    library = opened(names)
    if library is None:
        raise Refusal(f"the driver's library {names[0]} does not load")
    return Driver(library, hip=is_rocm())


def _names(hip: str | None) -> list[str]:
    windows = sys.platform == "win32"
    if hip is None:
        return ["nvcuda.dll"] if windows else ["libcuda.so.1"]
    major = hip.split(".")[0]
    return [f"amdhip64_{major}.dll"] if windows else ["libamdhip64.so", f"libamdhip64.so.{major}"]
