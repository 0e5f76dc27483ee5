"""Seconds of a tiny decoder, of ComfyUI's, and of this pack's full decode, of the same latent.

`python tests/benchmarks/bench_tiny.py` decodes 17 frames of 480 x 832 with random weights in the
layouts of `taew2_1` and of Wan 2.1, all in turn, and appends a JSON row per dtype and
implementation to `results.jsonl`. `--without-full --size 81x480x832` times the tiny decoders of a
whole clip. On a busy machine use `--one-core`.
"""

import argparse
import functools
import logging
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fast_video_vae.tests.benchmarks import record, timing  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import random_input, random_weights  # noqa: E402
from fast_video_vae.tests.nodes.checkout import import_comfyui  # noqa: E402
from fast_video_vae.tests.tiny import random_tiny  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402

Run = Callable[[Tensor], object]

_BASE_WIDTH = 96


def implementations(dtype: torch.dtype, device: torch.device, full: bool) -> dict[str, Run]:
    """Return the decodes by name."""
    from comfy.taesd.taehv import TAEHV

    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    network = TAEHV(16)
    network.load_state_dict(random_tiny(16), strict=False)
    network.eval().requires_grad_(False)
    decoder = TinyDecoder(network, is_raw=True)
    decoder.to(device, dtype, memory_format=torch.channels_last)
    network = network.to(device, dtype)
    found: dict[str, Run] = {
        "ours": lambda latent: [*decoder.frames(latent, device)],
        "comfyui": lambda latent: network.decode(latent.to(device, dtype)),
    }
    if full:
        vae = load_vae(random_weights("wan2.1", _BASE_WIDTH), dtype=dtype, device=device)
        found["full"] = vae.decode
    return found


def main() -> None:
    """Run the cases that the command line names."""
    args = _arguments()
    import_comfyui(Path(tempfile.mkdtemp()))
    device, clock = timing.best_device(), time.perf_counter
    if args.one_core:
        torch.set_num_threads(1)
        clock = time.process_time
    for name in args.dtype:
        runs = implementations(getattr(torch, name), device, not args.without_full)
        for size in args.size:
            frames, height, width = map(int, size.split("x"))
            latent = random_input("decode", "wan2.1", frames, height, width).to(device)
            calls = {key: functools.partial(run, latent) for key, run in runs.items()}
            with torch.inference_mode():
                seconds = timing.in_turn(calls, args.rounds, clock=clock)
            seconds = {key: each[1:] for key, each in seconds.items()}
            case = f"decode {size} {name}, tiny decoder of Wan 2.1"
            case += ", processor time of one core" if args.one_core else ""
            versions = dict.fromkeys(runs, record.commit())
            medians, ratios = timing.append(
                args.out, "bench_tiny", case, seconds, _BASE_WIDTH, versions
            )
            cells = ", ".join(f"{key} {medians[key]:.2f} s ({ratios[key]:.1f}x)" for key in runs)
            logging.info("%s: %s", case, cells)


def _arguments() -> argparse.Namespace:
    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--size", nargs="+", default=["17x480x832"], help="FRAMESxHEIGHTxWIDTH")
    parser.add_argument(
        "--one-core", action="store_true", help="processor time, for a busy machine"
    )
    parser.add_argument("--without-full", action="store_true", help="tiny decoders only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
