"""What int8 loses and gains: errors of decodes next to float32, and seconds next to bfloat16.

`python tests/benchmarks/bench_int8.py [--family wan2.1 wan2.2 seedvr2]` prints and
appends JSON rows to `results.jsonl`: per family, full-width random weights, a decode of 9 x 64 x 64
with the other layers in float32 and in bfloat16; and seconds of the bundled VAE, in pairs. The
errors are simulated where int8 does not pay. Run it on an idle machine.
"""

import math
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import bind  # noqa: F401
import torch

from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.tests.vae.families import VIDEO, latent_for
from fast_video_vae.vae import VAE_PATH, load_vae
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.int8 import layers, settings

PAIRS = 7


def error_db(frames, exact):
    """The mean squared error of frames in decibels."""
    return 10 * math.log10((frames.double() - exact.double()).square().mean().item())


def losses(out: Path, family: str):
    """Append the errors of bfloat16 and of int8 with both dtypes of the other layers."""
    state = random_weights(family)
    vae = load_vae(state, dtype=torch.float32)
    latent = latent_for(vae, 3, 64, 64)
    exact = vae.decode(latent)
    narrow = error_db(load_vae(state, dtype=torch.bfloat16).decode(latent), exact)
    for others in (torch.float32, torch.bfloat16):
        coded = load_vae(state, dtype=others)
        start = time.perf_counter()
        chosen = coded.int8_layers(others)
        seconds = time.perf_counter() - start
        coded.precision = "int8"
        error = error_db(coded.decode(latent), exact)
        case = f"decode 9x64x64 {family}, full-width random weights, other layers {others}"
        row = {"share": round(chosen.share, 3), "convolutions": len(chosen.names)}
        row |= {"choice_s": round(seconds, 1), "bf16_error_db": round(narrow, 2)}
        row |= {"int8_error_db": round(error, 2), "loss_db": round(error - narrow, 2)}
        print(case, row)
        record.append(out, "int8", case, **row)


def seconds_of(vae, latent):
    """The seconds of a decode."""
    start = time.perf_counter()
    vae.decode(latent)
    return time.perf_counter() - start


def times(out: Path):
    """Append the seconds of a decode by the bundled VAE with int8 and without."""
    plain, coded = (
        load_vae(VAE_PATH, dtype=torch.bfloat16, precision=each) for each in ("auto", "int8")
    )
    coded.wait_until_prepared()
    latent = latent_for(plain, 3, 480, 832)
    _ = seconds_of(plain, latent), seconds_of(coded, latent)
    pairs = [(seconds_of(plain, latent), seconds_of(coded, latent)) for _ in range(PAIRS)]
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    case = "decode 9x480x832, bundled VAE, other layers torch.bfloat16"
    row = {"share": round(coded.int8_layers(torch.bfloat16).share, 3)}
    row |= {"bf16_s": [round(slow, 3) for slow, _ in pairs]}
    row |= {"int8_s": [round(fast, 3) for _, fast in pairs], "bf16_over_int8": round(ratio, 3)}
    print(case, row)
    record.append(out, "int8", case, **row)


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--family", nargs="*", default=VIDEO, choices=VIDEO)
    args = parser.parse_args()
    kept = facts.Facts(Path(tempfile.mkdtemp(), "facts.json"), {})  # every choice is measured
    if reason := settings.int8_lacks(torch.device("cpu"), torch.bfloat16):
        print(f"no seconds: {reason}")
    else:
        times(args.out)
    with (
        mock.patch.object(settings, "int8_lacks", return_value=""),
        mock.patch.object(precision, "_is_slow", return_value=False),
        mock.patch.object(layers, "facts_of", return_value=kept),
    ):
        for family in args.family:
            losses(args.out, family)


if __name__ == "__main__":
    main()
