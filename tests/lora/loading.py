"""Measure the peak memory of reading three LoRAs of layers as large as those of Wan 14B, on Linux.

`measure` starts this file in a process of its own, which prints one line of JSON.
"""

import ctypes
import gc
import json
import runpy
import subprocess
import sys
from pathlib import Path

HIDDEN, FFN, RANK = 5120, 13824, 64


def measure(folder):
    """Return bytes: of the `bank`, of the largest `layer`, and the growth at the `peak`."""
    done = subprocess.run(
        [sys.executable, __file__, folder], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _main(folder):
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))  # binds the import name
    import torch
    from safetensors.torch import save_file

    from fast_video_vae.lora.bank import load_bank
    from fast_video_vae.lora.keys import Targets
    from fast_video_vae.tests.benchmarks.record import process_mib

    torch.set_num_threads(1)
    sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "up": (FFN, HIDDEN)}
    shapes = {f"diffusion_model.{name}.weight": size for name, size in sizes.items()}
    tensors = {}
    for name, (out, inner) in sizes.items():
        tensors[f"{name}.lora_A.weight"] = torch.zeros(RANK, inner, dtype=torch.bfloat16)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(out, RANK, dtype=torch.bfloat16)
    paths = [Path(folder) / f"{number}.safetensors" for number in range(3)]
    for path in paths:
        save_file(tensors, path)
    del tensors
    load_bank(paths[:1], Targets(shapes), torch.bfloat16)  # loads libraries and fills caches
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = process_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    bank = load_bank(paths, Targets(shapes), torch.bfloat16)
    peak = (process_mib("VmHWM") - before) * 2**20
    layer = 2 * RANK * (HIDDEN + FFN)
    sys.stdout.write(json.dumps({"bank": bank.nbytes, "layer": layer, "peak": peak}) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
