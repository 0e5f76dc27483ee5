"""The run-time compiler for C++ that PyTorch ships: NVRTC, or hiprtc for AMD GPUs.

It is called through its C interface (docs.nvidia.com/cuda/nvrtc; hiprtc has the same functions).
`torch.cuda._compile_kernel` wraps it too, but needs an installed CUDA toolkit for its include paths
up to PyTorch 2.13, does not exist before 2.9, and passes numbers of 32 bits only. `cuda-core`
does not come with PyTorch.
"""

import ctypes
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..devices import is_rocm
from ..errors import Refusal, first_error, log_once

# Where the packages of PyTorch and of NVIDIA have their libraries.
_FOLDERS = (
    "torch/lib", "nvidia/*/lib", "nvidia/*/bin", "nvidia/*/bin/x86_64", "_rocm_sdk_*/lib",
    "_rocm_sdk_*/bin",
)  # fmt: skip

# Jetson's chips, whose code does not run on others of their generation, nor the reverse.
_EMBEDDED = frozenset((53, 62, 72, 87, 101, 110))

# The chip with instructions that no later one has, and the first version of NVRTC with them.
_HOPPER, _KNOWS_OWN = 90, 12


class CompileError(RuntimeError):
    """The compiler refuses a source; the message is its first error."""


class Binary(NamedTuple):
    """Compiled kernels: a cubin, or a code object of an AMD GPU, and what the compiler printed."""

    code: bytes
    log: str


class Compiler:
    """A library with the interface of NVRTC; `prefix` is "nvrtc" or "hiprtc"."""

    def __init__(self, library: ctypes.CDLL, prefix: str = "nvrtc") -> None:
        self._library, self._prefix = library, prefix
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.major, self.version = major.value, f"{prefix} {major.value}.{minor.value}"
        if is_rocm():
            self.version += f" of ROCm {torch.version.hip}"  # hiprtc is 9.0 in all of them

    def chips(self) -> list[int]:
        """Return the chips that NVRTC compiles for; 89 has the compute capability 8.9."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        chips = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", chips)
        return list(chips)

    def compile(
        self, source: str, headers: Mapping[str, str], options: Sequence[str], name: str
    ) -> Binary:
        """Compile a source with the texts that it can include by name; no GPU is needed."""
        program = ctypes.c_void_p()
        texts, names = _array(headers.values()), _array(headers)
        self._call(
            "CreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers),
            texts, names,
        )  # fmt: skip
        try:
            status = self._function("CompileProgram")(program, len(options), _array(options))
            log = self._text("ProgramLog", program).decode(errors="replace").rstrip("\0").strip()
            if status:
                raise CompileError(first_error(log) or f"status {status}")
            code = "CUBIN" if self._prefix == "nvrtc" else "Code"
            return Binary(self._text(code, program), log)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _text(self, kind: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{kind}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{kind}", program, text)
        return text.raw

    def _function(self, name: str) -> Any:  # noqa: ANN401, a function of the library
        return getattr(self._library, self._prefix + name)

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise CompileError(f"{self._prefix}{name} returned {status}")


@functools.cache
def compiler() -> Compiler:
    """Load the compiler of this PyTorch, or refuse."""
    prefix, names = "hiprtc" if is_rocm() else "nvrtc", _names()
    if not names:
        raise Refusal("this PyTorch is built without CUDA")
    library = opened(names)
    if library is None:
        reason = f"the compiler {names[0]} does not load"
        log_once(f"{reason}, so GPUs run without the backend cuda; install PyTorch again")
        raise Refusal(reason)
    return Compiler(library, prefix)


def architecture(found: Compiler, device: torch.device) -> str:
    """Return the option that selects the chip of a device."""
    # A chip that is newer than the compiler runs what is compiled for the last one of its
    # generation that the compiler knows, such as 12.0 for 12.1.
    if is_rocm():
        return f"--offload-arch={torch.cuda.get_device_properties(device).gcnArchName}"
    major, minor = torch.cuda.get_device_capability(device)
    chip, known = 10 * major + minor, found.chips()
    if chip not in known:
        before = {each for each in known if 10 * major <= each < chip} - _EMBEDDED
        if not before:
            raise Refusal(f"{found.version} knows no chip of compute capability {major}.{minor}")
        chip = max(before)
    # Instructions of Hopper alone need the "a", which NVRTC 11 does not know.
    own = "a" if chip == _HOPPER == 10 * major + minor and found.major >= _KNOWS_OWN else ""
    return f"--gpu-architecture=sm_{chip}{own}"


def opened(names: Iterable[str]) -> ctypes.CDLL | None:
    """Open the first library that loads: one that comes with PyTorch, otherwise the system's."""
    root, names = Path(torch.__file__).parents[1], list(names)
    for name, folder in itertools.product(names, _FOLDERS):
        for path in sorted(root.glob(f"{folder}/{name}")):
            library = _library(path)
            if library is not None:
                # NVRTC opens its builtins by their name; 13.0 does not look in its own folder.
                for builtins in sorted(path.parent.glob("*nvrtc-builtins*")):
                    _library(builtins)
                return library
    return next(filter(None, map(_library, names)), None)


def _library(place: str | Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(place))
    except OSError:
        return None


def _names() -> list[str]:
    """Return the file names of the compiler's library for the version of this PyTorch."""
    windows = sys.platform == "win32"
    if torch.version.hip is not None:
        major, minor = torch.version.hip.split(".")[:2]
        if windows:
            return [f"hiprtc{int(major):02}{int(minor):02}.dll"]
        return ["libhiprtc.so", f"libhiprtc.so.{major}"]
    if torch.version.cuda is None:
        return []
    # A library serves all versions of CUDA with the same first number; 11 began with 11.2.
    major = torch.version.cuda.split(".")[0]
    if windows:
        return [f"nvrtc64_{'112' if major == '11' else major + '0'}_0.dll"]
    return [f"libnvrtc.so.{'11.2' if major == '11' else major}"]


def _array(texts: Iterable[str]) -> Any:  # noqa: ANN401, an array of ctypes
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
