"""The CUDA kernels on the CPU: g++ compiles the same sources with a header that emulates a GPU.

`emulated` makes the backend "cuda" run them on CPU tensors.
"""

import ctypes
import functools
import hashlib
import importlib
import os
import shlex
import struct
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from fast_video_vae.kernels import cache
from fast_video_vae.kernels.cuda_ops import attention, hopper, runtime
from fast_video_vae.kernels.cuda_ops.binaries import SOURCES, kernels, key
from fast_video_vae.kernels.errors import Refusal

FOLDER = Path(__file__).parent

# The function of the same name hides the module in its package.
blocks = importlib.import_module("fast_video_vae.kernels.reference.attention")

# No fused multiply-adds: they would hide sums that a GPU rounds twice. Memory that is not aligned
# ends the process: a GPU does not read it, and x86 does.
FLAGS = (
    "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-fno-gnu-unique",
)  # fmt: skip

_ENTRY = """
extern "C" const char* emulate_{0}(unsigned blocks, unsigned x, unsigned y, const void* memory,
                                   size_t bytes) {{
  return emulator::launch(fast_video_vae::{0}, blocks, x, y, memory, bytes);
}}
"""


class Module:
    """Kernels of a source, with the interface of those that the driver loads."""

    def __init__(self, library):
        self._library = library

    def launch(self, kernel, blocks, threads, arguments, stream):
        assert stream == 0
        function = getattr(self._library, f"emulate_{kernel}")
        function.restype = ctypes.c_char_p
        function.argtypes = [*(ctypes.c_uint,) * 3, ctypes.c_char_p, ctypes.c_size_t]
        error = function(blocks, *threads, arguments, len(arguments)).decode()
        if error:
            raise RuntimeError(error)


def compiler():
    return shlex.split(os.environ.get("CXX") or "c++")


@functools.cache
def compiled(source, constants):
    """Compile a source with macros, once for all test runs."""
    macros = [f"-DFVV_{name}={value}" for name, value in sorted(constants)]
    more = '#include "hopper.h"\n' if source == "hopper_conv" else ""
    text = f'#include "gpu.h"\n{more}#include "{source}.cu"\n'
    text += "".join(map(_ENTRY.format, kernels(source)))
    header = "".join((FOLDER / name).read_text() for name in ("gpu.h", "hopper.h"))
    digest = hashlib.sha256(key(source, (*FLAGS, *macros, header, text)).encode()).hexdigest()[:32]
    path = cache.folder("emulated") / f"{source}-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            entry, made = Path(folder) / "entry.cpp", Path(folder) / "made.so"
            entry.write_text(text)
            command = [*compiler(), *FLAGS, *macros, f"-I{FOLDER}", f"-I{SOURCES}"]
            command += [str(entry), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(path)
    return Module(ctypes.CDLL(str(path)))


@contextmanager
def emulated():
    """Make the backend "cuda" accept CPU tensors and run its kernels on the CPU."""

    def refuse_device(device):
        if device.type != "cpu":
            raise Refusal(f"the tensors are on {device.type}; the emulator needs the CPU")
        try:
            subprocess.run([*compiler(), "--version"], capture_output=True, check=True)
        except OSError:
            raise Refusal(f"the C++ compiler {compiler()[0]} is not installed") from None

    def loaded(source, constants, _):
        return compiled(source, frozenset(constants.items()))

    def mixed_product(a, b, scale):
        return torch.bmm(a.float(), b.float()).mul_(scale)

    with ExitStack() as stack:
        for module, name, stand_in in (
            (runtime, "refuse_device", functools.cache(refuse_device)),
            (runtime, "loaded", loaded),
            (runtime, "here", lambda _: nullcontext()),
            (runtime, "stream", lambda _: 0),
            (hopper, "tensor_map", tensor_map),
            (hopper, "refuse_chip", functools.cache(refuse_device)),
            (hopper, "multiprocessors", lambda _: 3),
            # Products of 16-bit numbers with results in float32, which only GPUs have.
            (attention, "multiplies_mixed", lambda *_: True),
            (attention, "in_blocks", functools.partial(in_blocks, mixed_product)),
        ):
            stack.enter_context(patch.object(module, name, stand_in))
        yield


def tensor_map(of):
    assert min(of.sizes)
    ones = [1] * (5 - len(of.sizes))
    steps = 2, *of.steps, *ones
    return struct.pack("P5Q5Q5II", of.address, *of.sizes, *ones, *steps, *of.box, *ones, of.swizzle)


def in_blocks(product, q, k, v, **options):
    with (
        patch.object(blocks, "multiplies_mixed", lambda *_: True),
        patch.object(blocks, "_mixed_product", product),
    ):
        return blocks.in_blocks(q, k, v, **options)
