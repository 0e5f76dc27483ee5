"""Make the stored results of the device check, or print the errors of this machine next to them.

`python tests/tools/expected.py` prints a table; with `--make` it writes the file: the reference in
float64 on the CPU, for the clip of the demonstration and for numbers from a formula. `--runs 10`
checks the CPU as often, and prints how much of the allowed error the worst case has.
`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA` and `FAST_VIDEO_VAE_ISA` choose its instructions.
"""

import argparse
import itertools
import os
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
from fast_video_vae.vae.streaming.prepared import cases, device_check, sketches

CPU = torch.device("cpu")
ISA = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "FAST_VIDEO_VAE_ISA")
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
        stored[case.name] = sketches.sketch(result).float()
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


def repeat(runs, threads, dtypes):
    """Print the worst share of an allowed error, and the wrong cases, of some runs."""
    native_library()
    torch.set_num_threads(threads)
    worst, wrong = dict.fromkeys(dtypes, 0.0), []
    for _, dtype in itertools.product(range(runs), worst):
        for row in device_check.rows(CPU, dtype):
            worst[dtype] = max(worst[dtype], row.error / row.bound)
            wrong += [] if row.is_right else [f"{row.case.name} {row.error:.1e} {row.reason}"]
    shares = ", ".join(f"{str(dtype)[6:]} {share:.0%}" for dtype, share in worst.items())
    chosen = [os.environ.get(name, "-") for name in ISA]
    print(torch.__version__, *chosen, f"threads {threads}, runs {runs}: {shares}; wrong: {wrong}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write the file")
    parser.add_argument("--runs", type=int, default=0, help="check the CPU as often")
    parser.add_argument("--threads", type=int, default=1, help="threads of these checks")
    names = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", default=names, help="dtypes of these checks")
    args = parser.parse_args()
    if args.make:
        make()
    if args.runs:
        repeat(args.runs, args.threads, [getattr(torch, name) for name in args.dtypes])
    else:
        table()
