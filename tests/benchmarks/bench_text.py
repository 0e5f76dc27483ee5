"""Prompts through a text encoder: ComfyUI's CLIPTextEncode one by one, and this pack's batches.

`python tests/benchmarks/bench_text.py --width 1024 --layers 8` times an encoder shaped like umT5
(512 tokens per prompt) with random weights, all variants in turn, and appends a JSON row per number
of prompts to `results.jsonl`. `--kind z_image` uses an encoder like Qwen3, which does not pad its
prompts. Ratios are medians over the rounds, each against ComfyUI in the same round; the ratios of
processor time are more reliable on a busy machine.
"""

import argparse
import logging
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name

import torch  # noqa: E402

from fast_video_vae.tests.benchmarks import record, timing  # noqa: E402
from fast_video_vae.tests.nodes import checkout  # noqa: E402
from fast_video_vae.tests.nodes.text import encoders  # noqa: E402

COMFYUI = "ComfyUI, one by one"

# About 60 to 120 tokens, the usual length of a prompt for a video.
PROMPTS = [
    " ".join(encoders.SENTENCES[:2]) + ", a prompt that says more of what is to be seen" * extra
    for extra in (0, 2, 4, 1, 3, 5)
]


def main() -> None:
    """Time every number of prompts."""
    parser = record.parser(__doc__)
    parser.add_argument("--kind", choices=["wan", "z_image"], default="wan")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16")
    parser.add_argument("--ways", nargs="+", help="only variants whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base, torch.inference_mode():
        checkout.import_comfyui(Path(base))
        clip = encoders.encoder(args.kind, getattr(torch, args.dtype), **_config(args))
        for count in args.prompts:
            runs = _ways(clip, PROMPTS[:count], args.ways)
            values = _measure(runs, args.rounds)
            network = f"{args.kind}, {args.layers} layers of {args.width}"
            case = f"{network}, {args.dtype}, {count} prompts"
            logging.info("%s", case)
            for name, seconds in values["seconds"].items():
                ratios = [values[key][name] for key in ("ratios", "cpu_ratios")]
                logging.info("  %-40s %8.3f s %6.2fx %6.2fx CPU", name, seconds, *ratios)
            logging.info("  first: %s\n  error: %s", values["first_s"], values["error"])
            record.append(args.out, "bench_text", case, **values)


def _config(args: argparse.Namespace) -> dict[str, object]:
    width, heads = args.width, args.width // 64
    if args.kind == "wan":
        sizes = {"d_model": width, "d_ff": width * 5 // 2, "d_kv": 64}
        return sizes | {"num_heads": heads, "num_layers": args.layers}
    sizes = {"hidden_size": width, "intermediate_size": width * 3}
    counts = {"num_attention_heads": heads // 2, "num_key_value_heads": heads // 4}
    return sizes | counts | {"num_hidden_layers": args.layers}


def _ways(
    clip: object, prompts: list[str], wanted: list[str] | None
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the variants by name; each returns the states of the last prompt."""
    from fast_video_vae.nodes.text.encode import encode

    def one_by_one() -> torch.Tensor:
        for prompt in prompts:
            conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        return conditioning[0][0]

    def ours(dtype: torch.dtype | None = None, **options: object) -> Callable[[], torch.Tensor]:
        return lambda: encode(clip, prompts, dtype, **options)[0][-1][0][0]

    bf16 = torch.bfloat16
    runs = {
        COMFYUI: one_by_one,
        "one pass": ours(),
        "one pass, compiled": ours(compiled=True),
        "one pass, bf16": ours(bf16),
        "one pass, bf16, compiled": ours(bf16, compiled=True),
        "from the cache": ours(cache_size=32),
    }
    return {
        name: run
        for name, run in runs.items()
        if wanted is None or name == COMFYUI or any(each in name for each in wanted)
    }


def _measure(runs: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, object]:
    """Time all variants in turn; the first run of each is reported separately."""
    states: dict[str, torch.Tensor] = {}
    # A complex number holds both clocks, so that one subtraction yields both times.
    taken = timing.in_turn(
        runs,
        rounds,
        clock=lambda: complex(time.perf_counter(), time.process_time()),
        look=states.__setitem__,
    )
    wall, cpu = (
        {name: [getattr(each, part) for each in both] for name, both in taken.items()}
        for part in ("real", "imag")
    )
    first = {name: round(each.pop(0), 3) for name, each in wall.items()}
    exact = states[COMFYUI]
    return {
        "seconds": {name: round(statistics.median(each), 4) for name, each in wall.items()},
        "ratios": _ratios(wall),
        "cpu_ratios": _ratios({name: each[1:] for name, each in cpu.items()}),
        "first_s": first,
        "error": {
            name: float(f"{((each - exact).norm() / exact.norm()).item():.2g}")
            for name, each in states.items()
        },
    }


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(timing.ratio(seconds, name, COMFYUI), 4) for name in seconds}


if __name__ == "__main__":
    main()
