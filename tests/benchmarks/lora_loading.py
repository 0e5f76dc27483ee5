"""Measure the peak memory of reading a stack of LoRAs for Wan 14B, on Linux.

`measure` starts this file in a process of its own, which prints one line of JSON. The files are
sparse: their zeros take memory, but no space on disk.
"""

import ctypes
import gc
import json
import runpy
import subprocess
import sys
from math import prod
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
HIDDEN, FFN = 5120, 13824


def measure(folder, blocks, files=3, rank=64):
    """Return bytes: `bank`, largest `layer`, growth at the `peak` and after reading (`rest`)."""
    command = [sys.executable, __file__, str(folder), str(blocks), str(files), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _main(folder, blocks, files, rank):
    runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name
    import torch

    from fast_video_vae.lora.bank import load_bank
    from fast_video_vae.lora.keys import Targets
    from fast_video_vae.tests.benchmarks.record import process_mib
    from fast_video_vae.tests.lora.models import PREFIX, modules, wan

    torch.set_num_threads(1)
    shapes = wan(blocks, HIDDEN, FFN, i2v=False)
    targets, names = Targets(shapes), [name for name in modules(shapes) if "blocks." in name]
    paths = [Path(folder) / f"{number}.safetensors" for number in range(files)]
    for path in paths:
        _write_zeros(path, shapes, names, rank, PREFIX)
    load_bank(paths[:1], targets, torch.bfloat16)  # loads libraries and fills caches
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = process_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    bank = load_bank(paths, targets, torch.bfloat16)
    peak, rest = process_mib("VmHWM") - before, process_mib("VmRSS") - before
    layer = 2 * rank * (HIDDEN + FFN)
    found = {"bank": bank.nbytes, "layer": layer, "peak": peak * 2**20, "rest": rest * 2**20}
    print(json.dumps(found))


def _write_zeros(path, shapes, names, rank, prefix):
    header, at = {}, 0
    for name in names:
        out, inner = shapes[f"{prefix}{name}.weight"]
        for part, shape in (("lora_A", (rank, inner)), ("lora_B", (out, rank))):
            end = at + 2 * prod(shape)
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": (at, end)}
            header[f"{prefix}{name}.{part}.weight"], at = entry, end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
