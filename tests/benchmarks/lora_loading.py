"""Measure the peak memory of reading a stack of LoRAs for Wan 14B, on Linux.

The files are sparse: their zeros take memory, but no space on disk.
"""

import ctypes
import gc
import json
from math import prod
from pathlib import Path

import torch

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora.models import PREFIX, modules, wan

HIDDEN, FFN = 5120, 13824


def measure(folder, blocks, files=3, rank=64):
    """Return bytes: `bank`, largest `layer`, growth at the `peak` and after reading (`rest`)."""
    shapes = wan(blocks, HIDDEN, FFN, i2v=False)
    targets, names = Targets(shapes), [name for name in modules(shapes) if "blocks." in name]
    paths = [Path(folder) / f"{number}.safetensors" for number in range(files)]
    for path in paths:
        _write_zeros(path, shapes, names, rank)
    load_bank(paths, targets, torch.bfloat16)  # loads libraries and fills caches
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    bank = load_bank(paths, targets, torch.bfloat16)
    peak, rest = _status("VmHWM") - before, _status("VmRSS") - before
    layer = 2 * rank * (HIDDEN + FFN)
    return {"bank": bank.nbytes, "layer": layer, "peak": peak, "rest": rest}


def _write_zeros(path, shapes, names, rank):
    header, at = {}, 0
    for name in names:
        out, inner = shapes[f"{PREFIX}{name}.weight"]
        for part, shape in (("lora_A", (rank, inner)), ("lora_B", (out, rank))):
            end = at + 2 * prod(shape)
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": (at, end)}
            header[f"{PREFIX}{name}.{part}.weight"], at = entry, end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def _status(name):
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
