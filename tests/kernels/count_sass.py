"""Count the instructions of the convolution's main loop, and print whether tensor cores limit it.

`python -m fast_video_vae.tests.kernels.count_sass 89 -- fp16,96,96 ...`, with Triton's interpreter
off: all tiles of 3x3x3 convolutions of 96 to 96 channels, one line of JSON per tile;
`int8-fp16,96,96` is the tile of int8 codes. The main loop
is the one with the largest share of matrix instructions in the SASS. A scheduler of an SM issues
one instruction of a warp per cycle, and its tensor core is busy for some cycles per matrix
instruction. Their ratio is the `margin`: above 1, tensor cores are the limit, as far as nothing
stalls.

The cycles are those of a tensor core of 256 float16 multiply-adds per cycle, and half of that with
sums in float32, as on A100: 312 TFLOP/s at 1.41 GHz are 256 for each of its 432 cores, and 624
TOP/s are 512 of int8 ("NVIDIA A100 Tensor Core GPU architecture", table 1). A GeForce RTX 4090 has
half the rate: 330 TFLOP/s at 2.52 GHz are 128 per core, and 660 TOP/s are 256 ("NVIDIA Ada GPU
architecture", appendix A). So its true margins are twice as large.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton

from fast_video_vae.tests.kernels.cross_compile import DTYPES, STARTED, compiled, used

# Cycles of `HMMA.16816`, a product of 16 x 16 and 16 x 8, by the dtype of its sums, and of
# `IMMA.16832`, which is one of 16 x 32 and 32 x 8.
CYCLES = {"F16": 8, "F32": 16, "S8": 8}

# Constants of a tile; those with descriptors have rows and columns.
TILE = ("M", "ROWS", "COLUMNS", "N0", "N1", "K", "HALF", "CACHE")


def instructions(cubin):
    """Return the instructions of a kernel, and the position of each label."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    lines, labels = [], {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L\w+):", line)
        if label:
            labels[label[1]] = len(lines)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line)
        if instruction:
            lines.append(instruction[1])
    return lines, labels


def main_loop(lines, labels):
    """Return the instructions of the loop with the largest share of matrix instructions.

    Waiting for a load may branch back from the end of the kernel, which looks like a longer loop.

    Args:
        lines: Instructions of a kernel.
        labels: Position of each label in them.

    Returns:
        The instructions from the label to the branch back to it.
    """
    loops = []
    for end, line in enumerate(lines):
        target = re.match(r"BRA\S*\s.*`\((\.L\w+)\)", line)
        if target and labels[target[1]] <= end:
            loops.append(lines[labels[target[1]] : end + 1])
    return max(loops, key=lambda loop: sum(_is_product(line) for line in loop) / len(loop))


def _is_product(line):
    return line.startswith(("HMMA", "IMMA"))


def margin(loop):
    """Return the counts of a main loop, and tensor cycles against issued instructions."""
    names = Counter(line.split()[0] for line in loop)
    products = {name: count for name, count in names.items() if _is_product(name)}
    cycles = sum(CYCLES[name.split(".")[2]] * count for name, count in products.items())
    return {
        "products": sum(products.values()),
        "instructions": len(loop),
        "tensor_cycles": cycles,
        "margin": round(cycles / len(loop), 2),
    }


def main(arguments):
    chips, cases = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    for case in cases:
        name, *sizes = case.split(",")
        kind, _, dtype = name.rpartition("-")
        for chip in map(int, chips):
            tried = set()
            for kernel, args, constants, options in STARTED[kind or "conv"](
                chip, DTYPES[dtype], *map(int, sizes)
            ):
                tile = {key: constants[key] for key in TILE if key in constants}
                key = (*tile.values(), constants.get("NORM"), *options.values())
                if key in tried:  # the same tile with other taps
                    continue
                tried.add(key)
                cubin = compiled(kernel, args, constants, options, chip).asm["cubin"]
                registers, stack, local = used(cubin)
                line = {
                    "case": case,
                    "chip": chip,
                    "norm": constants.get("NORM", False),
                    **tile,
                    **options,
                }
                line |= {"registers": registers, "stack": stack + local}
                line |= margin(main_loop(*instructions(cubin)))
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
