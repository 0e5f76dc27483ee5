"""The CUDA kernels on the CPU: the same sources, compiled with headers that emulate a GPU.

`emulated` makes `cuda_ops` use this library and accept CPU tensors.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from fast_video_vae.kernels import cuda_ops
from fast_video_vae.kernels.build import Library
from fast_video_vae.kernels.cuda_ops.library import CUDA
from fast_video_vae.kernels.errors import Refusal


class _Emulated(Library):
    name = "fast_video_vae_emulated"
    namespace = CUDA.namespace
    title = "emulated CUDA kernels"
    minutes = "half a minute"
    sources = Path(__file__).parent

    # -O1: tests wait for the build, and switches between threads take most of the time afterwards.
    compiler = ("-O1", "-Wno-unknown-pragmas", "-DFVV_DISPATCH_KEY=CPU")

    def files(self):
        mine = [path for path in self.sources.iterdir() if path.suffix in (".h", ".cpp")]
        return [*sorted(mine), *CUDA.files()]

    def made_from(self):
        return self.compiler

    def options(self):
        return {
            "sources": [str(self.sources / "kernels.cpp"), str(CUDA.sources / "bindings.cpp")],
            "extra_cflags": list(self.compiler),
            "extra_include_paths": [str(self.sources), str(CUDA.sources)],
        }


EMULATED = _Emulated()


@contextmanager
def emulated():
    """Make the backend "cuda" accept CPU tensors and run its kernels on the CPU."""

    def refuse_device(device, _):
        if device.type != "cpu":
            raise Refusal(f"the tensors are on {device.type}; the emulator needs the CPU")

    with ExitStack() as stack:
        for name, stand_in in {
            "CUDA": EMULATED,
            "_refuse_device": refuse_device,
            "_entered": lambda _: nullcontext(),
            "_stream": lambda _: 0,
        }.items():
            stack.enter_context(patch.object(cuda_ops, name, stand_in))
        yield
