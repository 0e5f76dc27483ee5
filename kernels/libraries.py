"""The libraries of `csrc/` that are built where they run: one for the CPU, one for NVIDIA GPUs.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 switches the CPU kernels off.
    CUDA_HOME: The CUDA toolkit, where nvcc is not on PATH.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .build import Failure, Library, extension

_CSRC = Path(__file__).parent / "csrc"


class _Cpu(Library):
    name = "fast_video_vae_cpu"
    namespace = "fast_video_vae"
    title = "CPU kernels"
    minutes = "half a minute"
    sources = _CSRC / "cpu"

    # Contraction to fused multiply-adds is left on: what has to be bit-equal to the reference has
    # no product that a sum follows. The kernels never ask for errno or floating-point traps.
    compiler = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-g0")

    # PyTorch's threads are OpenMP's, and its header splits the work in our code. Apple's compiler
    # has none: bindings.cpp starts threads there.
    openmp = () if sys.platform == "darwin" else ("-fopenmp",)

    def switched_off(self) -> str:
        if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
            return "FAST_VIDEO_VAE_NATIVE=0 switches the native kernels off"
        return ""

    def made_from(self) -> Sequence[str]:
        return (*self.compiler, *self.openmp)

    def options(self) -> dict[str, Any]:
        return {
            "sources": [str(path) for path in sorted(self.sources.glob("*.cpp"))],
            "extra_cflags": [*self.compiler, *self.openmp],
            "extra_ldflags": list(self.openmp),
        }


class _Cuda(Library):
    name = namespace = "fast_video_vae_cuda"
    title = "CUDA kernels"
    minutes = "a minute"
    sources = _CSRC / "cuda"

    compiler = ("-O3", "-g0")

    def made_from(self) -> Sequence[str]:
        return (*self.compiler, f"CUDA {torch.version.cuda}", *self._architectures())

    def check_tools(self) -> None:
        super().check_tools()
        home = extension().CUDA_HOME
        if home is None or not (Path(home) / "bin" / "nvcc").exists():
            raise Failure(
                f"there is no nvcc ({home or 'CUDA_HOME is not set'})",
                f"install the CUDA toolkit {torch.version.cuda}, and set CUDA_HOME to its folder",
            )

    def options(self) -> dict[str, Any]:
        sources = [*self.sources.glob("*.cpp"), *self.sources.glob("*.cu")]
        return {
            "sources": [str(path) for path in sorted(sources)],
            "extra_cflags": list(self.compiler),
            "extra_cuda_cflags": ["-O3", *self._architectures()],
        }

    def failed(self, error: str) -> Failure:
        return Failure(
            f"nvcc or the C++ compiler failed ({error})",
            f"install the CUDA toolkit {torch.version.cuda} and a g++ that it takes",
        )

    def _architectures(self) -> list[str]:
        """Code for every GPU of this machine, and no other."""
        if torch.version.cuda is None:
            raise Failure(
                "this PyTorch is built without CUDA", "install a PyTorch for CUDA (pytorch.org)"
            )
        found = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
        names = (f"{major}{minor}" for major, minor in sorted(found))
        return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


CPU = _Cpu()
CUDA = _Cuda()
