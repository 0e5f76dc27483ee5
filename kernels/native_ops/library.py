"""The library of `csrc/cpu`, built on the user's machine.

Environment:
    FAST_VIDEO_VAE_NATIVE: 0 disables the CPU kernels.
"""

import os
from pathlib import Path

from .build import Library


class _Cpu(Library):
    namespace = "fast_video_vae"
    title = "CPU kernels"
    minutes = "half a minute"
    sources = Path(__file__).parents[1] / "csrc" / "cpu"

    def switched_off(self) -> str:
        if os.environ.get("FAST_VIDEO_VAE_NATIVE") == "0":
            return "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels"
        return ""


CPU = _Cpu()
