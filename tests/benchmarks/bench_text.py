"""Prompts through a text encoder: ComfyUI's CLIPTextEncode one by one, and this pack's batches.

`python tests/benchmarks/bench_text.py --width 1024 --layers 8` times an encoder shaped like umT5
(512 tokens per prompt) with random weights, all variants in turn, and appends a JSON row per number
of prompts to `results.jsonl`. `--kind z_image` uses an encoder like Qwen3, which does not pad its
prompts. Ratios are medians over the rounds, each against ComfyUI in the same round; the ratios of
processor time are more reliable on a busy machine.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bind  # noqa: F401
import torch

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.nodes import checkout
from fast_video_vae.tests.nodes.text import encoders

COMFYUI = "ComfyUI, one by one"

# About 60 to 120 tokens, the usual length of a prompt for a video.
PROMPTS = [
    " ".join(encoders.SENTENCES[:2]) + ", a prompt that says more of what is to be seen" * extra
    for extra in (0, 2, 4, 1, 3, 5)
]


def main() -> None:
    """Time every number of prompts."""
    parser = record.parser(__doc__, width=1024, layers=8, prompts=[2], dtype="float16", rounds=5)
    parser.add_argument("--kind", choices=["wan", "z_image"], default="wan")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base, torch.inference_mode():
        checkout.import_comfyui(Path(base))
        clip = encoders.encoder(args.kind, getattr(torch, args.dtype), **_config(args))
        for count in args.prompts:
            values = _measure(_ways(clip, PROMPTS[:count]), args.rounds)
            network = f"{args.kind}, {args.layers} layers of {args.width}"
            case = f"{network}, {args.dtype}, {count} prompts"
            logging.info("%s: %s", case, values)
            record.append(args.out, "bench_text", case, **values)


def _config(args: argparse.Namespace) -> dict[str, object]:
    width, heads = args.width, args.width // 64
    if args.kind == "wan":
        sizes = {"d_model": width, "d_ff": width * 5 // 2, "d_kv": 64}
        return sizes | {"num_heads": heads, "num_layers": args.layers}
    sizes = {"hidden_size": width, "intermediate_size": width * 3}
    counts = {"num_attention_heads": heads // 2, "num_key_value_heads": heads // 4}
    return sizes | counts | {"num_hidden_layers": args.layers}


def _ways(clip: object, prompts: list[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the variants by name; each returns the states of the last prompt."""
    from fast_video_vae.nodes.text.encode import encode

    def one_by_one() -> torch.Tensor:
        for prompt in prompts:
            conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        return conditioning[0][0]

    def ours(dtype: torch.dtype | None = None, **options: object) -> Callable[[], torch.Tensor]:
        return lambda: encode(clip, prompts, dtype, **options)[0][-1][0][0]

    bf16 = torch.bfloat16
    return {
        COMFYUI: one_by_one,
        "one pass": ours(),
        "one pass, compiled": ours(compiled=True),
        "one pass, bf16": ours(bf16),
        "one pass, bf16, compiled": ours(bf16, compiled=True),
        "from the cache": ours(cache_size=32),
    }


def _measure(runs: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, object]:
    """Time all variants in turn; the first run of each is reported separately."""
    states: dict[str, torch.Tensor] = {}
    # A complex number holds both clocks, so that one subtraction yields both times.
    taken = record.in_turn(
        runs,
        rounds,
        clock=lambda: complex(time.perf_counter(), time.process_time()),
        look=states.__setitem__,
    )
    later = record.after_first(taken)
    wall = {name: [each.real for each in both] for name, both in later.items()}
    cpu = {name: [each.imag for each in both] for name, both in later.items()}
    exact = states[COMFYUI]
    errors = {name: ((x - exact).norm() / exact.norm()).item() for name, x in states.items()}
    return {
        "seconds": {name: round(statistics.median(each), 4) for name, each in wall.items()},
        "ratios": {name: round(record.ratio(wall, name, COMFYUI), 4) for name in wall},
        "cpu_ratios": {name: round(record.ratio(cpu, name, COMFYUI), 4) for name in cpu},
        "first_s": {name: round(both[0].real, 3) for name, both in taken.items()},
        "error": {name: float(f"{error:.2g}") for name, error in errors.items()},
    }


if __name__ == "__main__":
    main()
