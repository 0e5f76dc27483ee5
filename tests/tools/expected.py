"""Make the stored results of the device check, or print the errors of this machine next to them.

`python tests/tools/expected.py` prints a table; with `--make` it writes the file: the reference in
float64 on the CPU, for the clip of the demonstration and for numbers from a formula.
`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA` and `FAST_VIDEO_VAE_ISA` choose its instructions.
"""

import argparse
import runpy
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from fast_video_vae.kernels import Fallback, library_of, native_library, padded
from fast_video_vae.vae.demo import CLIP_PATH
from fast_video_vae.vae.media import read_video
from fast_video_vae.vae.streaming.prepared import cases, device_check

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def clip():
    """Return 9 frames of 64 x 48 of the demonstration, uint8 `[1, 3, 9, 48, 64]`."""
    frames = torch.stack(list(read_video(CLIP_PATH).frames()))[:18:2]
    small = F.interpolate(frames.permute(0, 3, 1, 2).float(), size=(64, 64), mode="area")
    return small[:, :, 8:56].round().to(torch.uint8).transpose(0, 1)[None].contiguous()


def make():
    """Write the sketches of all cases."""
    seen = replace(library_of(CPU), native=False, fallback=Fallback(reference=True))
    stored = {"clip": clip(), "latent": torch.zeros(1, 16, 3, 6, 8)}
    cases.expected = lambda: stored
    for case in cases.cases()[::-1]:  # the encoder makes the latent of the decoder
        with cases.seeing(seen), cases.layer_modes(CPU):
            result = case.run(CPU, torch.float64, seen)
        if case.name == "encoder of the bundled VAE":
            stored["latent"] = result[:, :16].to(torch.bfloat16).float().contiguous()
        stored[case.name] = cases.sketch(result).float()
    save_file(stored, cases.EXPECTED)


def table():
    """Print the errors of this machine by case, and the bounds of blocks."""
    native_library()
    rows = [["case", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]]
    found = {dtype: list(device_check.rows(CPU, dtype)) for dtype in DTYPES}
    for number, case in enumerate(cases.cases()):
        shares = (found[dtype][number] for dtype in DTYPES)
        rows.append([case.name, *(f"{each.error:.1e} / {each.bound:.0e}" for each in shares)])
    print("\n".join(" ".join(row).rstrip() for row in padded(rows, 1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write the file first")
    if parser.parse_args().make:
        make()
    table()
