"""Seconds of a tiny decoder, of ComfyUI's, and of this pack's full decode, of the same latent.

`python tests/benchmarks/bench_tiny.py` decodes 17 frames of 480 x 832 with random weights in the
layouts of `taew2_1` and of Wan 2.1, all in turn, and appends a JSON row per dtype and
implementation to `results.jsonl`. `--without-full --size 81x480x832` times the tiny decoders of a
whole clip. On a busy machine use `--one-core`, which measures processor time.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bind  # noqa: F401
import torch
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_weights
from fast_video_vae.tests.nodes.checkout import import_comfyui
from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.vae import load_vae

Run = Callable[[Tensor], object]


def implementations(dtype: torch.dtype, full: bool) -> dict[str, Run]:
    """Return the decodes by name."""
    from comfy.taesd.taehv import TAEHV

    from fast_video_vae.nodes.preview.tiny_decoder import TinyDecoder

    device, network = record.best_device(), TAEHV(16)
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
        found["full"] = load_vae(random_weights("wan2.1"), dtype=dtype, device=device).decode
    return found


def main() -> None:
    """Run the cases that the command line names."""
    args = record.parser(
        __doc__, rounds=1, dtype=["float32", "bfloat16"], size=["17x480x832"], one_core=False,
        without_full=False,
    ).parse_args()  # fmt: skip
    import_comfyui(Path(tempfile.mkdtemp()))
    clock = time.process_time if args.one_core else time.perf_counter
    if args.one_core:
        torch.set_num_threads(1)
    for name in args.dtype:
        runs = implementations(getattr(torch, name), not args.without_full)
        for size in args.size:
            latent = random_input("decode", "wan2.1", *record.size_of(size))
            latent = latent.to(record.best_device())
            calls = {key: functools.partial(run, latent) for key, run in runs.items()}
            with torch.inference_mode():
                seconds = record.after_first(record.in_turn(calls, args.rounds, clock=clock))
            case = f"decode {size} {name}, tiny decoder of Wan 2.1"
            case += ", processor time of one core" if args.one_core else ""
            versions = dict.fromkeys(runs, record.commit())
            record.append_each(args.out, "bench_tiny", case, seconds, WIDTHS["wan2.1"], versions)


if __name__ == "__main__":
    main()
