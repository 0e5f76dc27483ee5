"""The library of `csrc/cpu`, built on the user's machine.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 disables the CPU kernels.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .build import Library


class _Cpu(Library):
    name = "fast_video_vae_cpu"
    namespace = "fast_video_vae"
    title = "CPU kernels"
    minutes = "half a minute"
    sources = Path(__file__).parents[1] / "csrc" / "cpu"

    # Contraction to fused multiply-adds is allowed: ops that must be bit-identical to the reference
    # have no sum after a product. The kernels need neither errno nor floating-point traps.
    compiler = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-g0")

    # PyTorch uses OpenMP threads, and its header splits the work in our code. Apple's compiler has
    # no OpenMP: bindings.cpp starts threads there.
    openmp = () if sys.platform == "darwin" else ("-fopenmp",)

    def switched_off(self) -> str:
        if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
            return "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels"
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
