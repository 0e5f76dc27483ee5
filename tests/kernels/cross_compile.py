"""Compile the Triton kernels for GPUs that this machine lacks, and print the resources they use.

`python -m fast_video_vae.tests.kernels.cross_compile 90 bf16,96 ...`, with Triton's interpreter
off. The ops run on meta tensors, and every kernel that they launch is compiled as Triton would on
its first call. `conv-fp16,96,192` is all tiles of a convolution of 96 to 192 channels, and
`int8-fp16,96,192` the one of int8 codes. The output is one line of JSON per kernel.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_PACKAGE = "fast_video_vae.kernels.triton_ops"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_FILES = "rows", "norms", "layout", "convolution", "int8_convolution", "convolution_tiles"
rows, norms, layout, convolution, int8_convolution, tiles = (
    importlib.import_module(f"{_PACKAGE}.{name}") for name in _FILES
)


of_weight = convolution.ConvWeight.of


class Driver:
    """A driver whose only GPU has the compute capability `chip`, and cannot run anything."""

    def __init__(self, chip):
        self.get_current_target = lambda: GPUTarget("cuda", chip, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def recording(*modules):
    """Let modules of the backend compile their launches instead; return the list of these."""
    started = []

    def launch(kernel, grid, *args, warps=4, **constants):
        options = constants | {"num_warps": warps, "enable_fp_fusion": True}
        result = kernel.warmup(*args, grid=grid, **options)
        started.append((kernel.__name__, result, str(constants)))

    for module in modules:
        module.launch = launch
    return started


def video(count, frames, dtype, height=360, width=640):
    shape = (1, frames, height, width, count)
    return torch.empty(shape, dtype=dtype, device="meta").movedim(-1, 1)


def launches(_, dtype, channels):
    started = recording(rows, norms, layout)
    x, numbers = video(channels, 4, dtype), torch.empty(channels, dtype=dtype, device="meta")
    flat = x.movedim(1, -1).flatten(0, 3)
    saturated = torch.empty(2, dtype=torch.int64, device="meta")
    for coded in (False, True):
        written = torch.int8 if coded else dtype
        tail, out = video(channels, 2, written), video(channels, 6, written, 362, 642)
        counts = (torch.empty(channels, device="meta"), saturated) if coded else (None, None)
        window = tail, out, *counts
        norms.rms_norm_silu(x, numbers, numbers, *window, True, 1)
        norms.group_norm_silu(x, numbers, numbers, None, *window, 32, 1e-6, True, 1)
    norms.rms_norm_silu(x, numbers, None, None, x, None, None, True, 0)
    rows.silu_mul(flat, flat, flat)
    rows.bias_residual(x, numbers, x, numbers, x)
    grid, out = video(4 * channels, 4, dtype, 361, 641), video(channels, 4, dtype, 720, 1280)
    layout.merge_phases(grid, video(channels, 2, dtype), numbers, out, 2)
    layout.merge_phases(grid, None, None, out, 1)
    layout.interleave_time(video(2 * channels, 4, dtype), video(channels, 8, dtype), 2)
    out = video(channels, 8, dtype, 720, 1280)
    layout.pixel_shuffle_3d(video(8 * channels, 4, dtype), out, (2, 2, 2), "hwtc")
    layout.average_down(x, video(2 * channels, 2, dtype, 180, 320), 2, 2)
    for kind in (torch.float32, torch.uint8, torch.uint16):
        for inputs, patch in ((12, 2), (3, 1)):
            size = 4, 360 * patch, 640 * patch, 3
            out = torch.empty(size, dtype=kind, device="meta")
            layout.frames_to_images(video(inputs, 4, dtype), out, patch, "ctwh")
    return started


def convolutions(chip, dtype, inputs, outputs):
    """Return the launches of all tiles, and those of the first fit for other kernels."""
    started, key = recording(convolution), divmod(chip, 10)
    convolution.chip_of = lambda _: key

    def run(kernel, stride=(1, 1, 1), padding=(0, 0), tile=0, gamma=None):
        weight = torch.empty(outputs, inputs, *kernel, dtype=dtype, device="meta")
        kept, tail = of_weight(weight), video(inputs, 2, dtype)
        args = video(inputs, 4, dtype), kept, None, None, None, gamma, tail, None
        convolution.conv3d(*args, stride, padding, tile)

    for tile in range(len(tiles.tiles_of(key, dtype, outputs))):
        run((3, 3, 3), padding=(1, 1), tile=tile)
        gamma = torch.empty(outputs, dtype=dtype, device="meta")
        run((3, 3, 3), padding=(1, 1), tile=tile, gamma=gamma)
    for other in (((3, 3, 3),), ((3, 3, 3), (2, 2, 2), (1, 1)), ((3, 1, 1),), ((1, 1, 1),)):
        run(*other)
    return started


def codes(chip, dtype, inputs, outputs):
    """Return the launches of int8 convolutions with all terms, and one of the plain sums."""
    started = recording(int8_convolution)
    int8_convolution.chip_of = lambda _: divmod(chip, 10)
    scale = torch.empty(outputs, device="meta")
    for kernel in ((3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1)):
        times, high, wide = kernel
        weight = torch.empty(outputs, inputs, *kernel, dtype=torch.int8, device="meta")
        x, kept = video(inputs, 3 + times, torch.int8, 359 + high, 639 + wide), of_weight(weight)
        residual = video(outputs, 4, dtype)
        int8_convolution.int8_conv3d(x, kept, scale, scale, residual, scale, residual, dtype)
        if times * high == 9:
            int8_convolution.int8_conv3d(x, kept, *(None,) * 5, torch.int32)
    return started


def stack_bytes(result):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(result.asm["cubin"])
        command = [tool, "--dump-resource-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("STACK", "LOCAL"))


# Launches of a case by the word in front of its dtype.
STARTED = {"": launches, "conv": convolutions, "int8": codes}


def main(chip, *cases):
    driver.set_active(Driver(int(chip)))
    for case in cases:
        name, *sizes = case.split(",")
        kind, _, dtype = name.rpartition("-")
        for kernel, result, tile in STARTED[kind](int(chip), DTYPES[dtype], *map(int, sizes)):
            line = {"kernel": kernel, "case": case, "stack": stack_bytes(result), "tile": tile}
            line |= {"shared": result.metadata.shared}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
