"""The library of `csrc/cpu`, which is built where it runs.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 switches the CPU kernels off.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..build import Library


class _Cpu(Library):
    name = "fast_video_vae_cpu"
    namespace = "fast_video_vae"
    title = "CPU kernels"
    minutes = "half a minute"
    sources = Path(__file__).parents[1] / "csrc" / "cpu"

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


CPU = _Cpu()
