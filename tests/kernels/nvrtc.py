"""The CUDA kernels as NVRTC compiles them for chips that this machine lacks.

NVRTC needs no GPU: `pip install nvidia-cuda-nvrtc`.
"""

import functools
import re
from itertools import product

from fast_video_vae.kernels.cuda_ops.binaries import SOURCES, headers, options
from fast_video_vae.kernels.cuda_ops.compiler import Compiler, opened

CHIPS = (75, 80, 86, 90, 120)

# Numbers of a pack of 16 bytes.
_PACKS = {"float": 4, "bfloat16": 8, "half": 8}

# Dtypes of images only.
_INTEGERS = ("uint8", "uint16")

_USED = {
    "stack": r"(\d+) bytes stack frame",
    "spilled": r"(\d+) bytes spill stores",
    "registers": r"Used (\d+) registers",
    "shared": r"(\d+) bytes smem",
}


@functools.cache
def compiler(*majors):
    """Return NVRTC, of some major versions or of any, or None if it is not installed."""
    library = opened([f"libnvrtc.so.{major}" for major in majors or (13, 12)])
    return library and Compiler(library)


def variants():
    """Return the sources with the constants of all binaries that ops can ask for."""
    found = []
    for path in sorted({*SOURCES.glob("*.cu")} - {SOURCES / "hopper_conv.cu"}):
        for dtype, wide in _PACKS.items():
            if path.stem == "softmax" and dtype == "float":
                continue
            for pack in (wide, 1):
                constants = {"DTYPE": dtype, "PACK": pack}
                found += [
                    (path.stem, {**constants, **more}) for more in _more(path.stem, constants)
                ]
    return found


def _more(source, constants):
    """Return the other constants of a source: images have no packs."""
    if source in ("rms_norm", "group_norm"):
        return [{}, {"CODES": 1}]
    if source != "spread":
        return [{}]
    kinds = [
        {"RESULT": result, "SAME": int(result == constants["DTYPE"]), "IMAGES": images}
        for result, images in product((*_PACKS, *_INTEGERS), (0, 1))
        if result not in _INTEGERS or images
    ]
    return [
        kind for kind in kinds if constants["PACK"] == 1 or (kind["SAME"] and not kind["IMAGES"])
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
