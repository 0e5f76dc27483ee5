"""Measure the peak memory of reading a stack of LoRAs, in a separate process.

`measure` starts this file, which prints one line of JSON. The files are as large as those of
Wan 14B, and sparse: their zeros take memory, but no space on disk.
"""

import ctypes
import gc
import json
import runpy
import subprocess
import sys
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
HIDDEN, FFN, TEXT = 5120, 13824, 4096


def can_measure():
    """Return whether the system records the peak memory of a process and can reset it."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return "VmHWM" in _STATUS.read_text(encoding="utf-8")


def measure(folder, blocks, files=3, rank=64):
    """Return bytes: `bank`, largest `layer`, growth at the `peak` and after reading (`rest`)."""
    command = [sys.executable, __file__, str(folder), str(blocks), str(files), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_zeros(path, blocks, rank):
    """Write a bfloat16 LoRA of zeros for the ten linear layers of each block of Wan 14B."""
    sizes = {f"{kind}.{name}": (HIDDEN, HIDDEN)
             for kind in ("self_attn", "cross_attn") for name in "qkvo"}  # fmt: skip
    sizes |= {"ffn.0": (FFN, HIDDEN), "ffn.2": (HIDDEN, FFN)}
    header, at = {}, 0
    for block in range(blocks):
        for name, (out, inner) in sizes.items():
            for part, shape in (("lora_A", (rank, inner)), ("lora_B", (out, rank))):
                end = at + 2 * shape[0] * shape[1]
                key = f"diffusion_model.blocks.{block}.{name}.{part}.weight"
                header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, end)}
                at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def _main(folder, blocks, files, rank):
    runpy.run_path(str(_CONFTEST))
    import torch

    from fast_video_vae.lora.bank import load_bank
    from fast_video_vae.lora.keys import Targets
    from fast_video_vae.tests.lora.models import wan

    torch.set_num_threads(1)
    targets = Targets(wan(blocks, HIDDEN, FFN, i2v=False, text=TEXT))
    paths = [Path(folder) / f"{number}.safetensors" for number in range(files)]
    small = Path(folder) / "small.safetensors"
    write_zeros(small, 1, 8)
    for path in paths:
        write_zeros(path, blocks, rank)
    load_bank([small], targets, torch.bfloat16)  # loads libraries and fills caches
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    _RESET.write_text("5", encoding="ascii")
    bank = load_bank(paths, targets, torch.bfloat16)
    peak = _status("VmHWM") - before
    layer = 2 * rank * (HIDDEN + FFN)
    rest = _status("VmRSS") - before
    result = {"bank": bank.nbytes, "layer": layer, "peak": peak, "rest": rest}
    print(json.dumps(result))  # noqa: T201 - for the process that started this one


def _status(name):
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
