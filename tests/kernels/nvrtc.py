"""The CUDA kernels as NVRTC compiles them for chips that this machine lacks.

NVRTC needs no GPU: `pip install nvidia-cuda-nvrtc`.
"""

import functools
import re

from fast_video_vae.kernels.cuda_ops.binaries import SOURCES, headers, options
from fast_video_vae.kernels.cuda_ops.compiler import Compiler, opened

_USED = {
    "stack": r"(\d+) bytes stack frame",
    "spilled": r"(\d+) bytes spill stores",
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
}


@functools.cache
def compiler():
    """Return NVRTC, or None if it is not installed."""
    library = opened(["libnvrtc.so.13", "libnvrtc.so.12"])
    return library and Compiler(library)


def variants(pack):
    """Return the sources with constants of all kinds, in bfloat16 and packs of `pack` numbers."""
    moved = [{"RESULT": "bfloat16", "SAME": 1, "IMAGES": 0}]
    if pack == 1:  # as images have it
        moved += [{"RESULT": each, "SAME": 0, "IMAGES": 1} for each in ("float", "uint8", "uint16")]
    kinds = {"spread": moved} | {key: [{}, {"CODES": 1}] for key in ("rms_norm", "group_norm")}
    return [
        (path.stem, {"DTYPE": "bfloat16", "PACK": pack, **more})
        for path in sorted({*SOURCES.glob("*.cu")} - {SOURCES / "hopper_conv.cu"})
        for more in kinds.get(path.stem, [{}])
    ]


def compiled(source, constants, chip, *more):
    """Compile a source for a chip, such as 89, with `more` options."""
    text = (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
    given = [*options(constants, f"--gpu-architecture=sm_{chip}"), *more]
    return compiler().compile(text, headers(), given, f"{source}.cu")


def resources(source, constants, chip):
    """Return bytes of stack and spills, registers and shared memory of each kernel of a source."""
    log = compiled(source, constants, chip, "--ptxas-options=-v").log
    return {
        part.split("'")[1]: {
            key: int((re.search(pattern, part) or ["0", "0"])[1]) for key, pattern in _USED.items()
        }
        for part in log.split("Compiling entry function ")[1:]
    }
