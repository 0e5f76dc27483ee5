"""A LoRA on a linear layer: this pack's modes, ComfyUI's bypass and a merge per call, in one run.

`python tests/benchmarks/bench_lora.py --width 5120 --rank 64 --tokens 4096 512` times them in turn
and appends a JSON row per case to `results.jsonl`. ComfyUI's own bypass is timed where ComfyUI is
installed. `--memory` measures the peak of reading three LoRAs for Wan 14B instead, `--errors` the
error of a LoRA's effect on fp8 weights, with this pack and with ComfyUI's loader, and `--weak` the
shares of small deltas that bf16 weights keep.
"""

import logging
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fast_video_vae.tests.benchmarks import lora_ways, record, timing  # noqa: E402
from fast_video_vae.tests.lora import loading  # noqa: E402
from fast_video_vae.tests.nodes import checkout  # noqa: E402
from fast_video_vae.tests.nodes.lora import lora_errors  # noqa: E402

# Deltas as parts of the weights.
_WEAK = (0.01, 0.003, 0.001, 0.0003)


def main() -> None:
    """Time every number of tokens."""
    parser = record.parser(__doc__)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--leave", type=int, help="output features of the layer (default: --width)")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--weak", action="store_true")
    args = parser.parse_args()
    if args.weak:
        with _comfyui():
            found = {amount: lora_errors.weak_shares(amount) for amount in _WEAK}
        for amount, shares in found.items():
            case = f"deltas of {100 * amount:g} % of bf16 weights, 20 layers: share that is kept"
            values = _by_way(shares)
            logging.info("%s: %s", case, values)
            record.append(args.out, "bench_lora", case, **values)
        return
    if args.memory or args.errors:
        case, values = _memory() if args.memory else _errors()
        logging.info("%s: %s", case, values)
        record.append(args.out, "bench_lora", case, **values)
        return
    dtype, out = getattr(torch, args.dtype), args.leave or args.width
    device = timing.best_device()
    model = lora_ways.Layers([(args.width, out)], device, dtype)
    for tokens in args.tokens:
        x = torch.randn(1, tokens, args.width, device=device).to(dtype)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            runs = lora_ways.ways(model, x, args.rank, Path(folder))
            runs |= _bypass_of_comfyui(model, x, args.rank, Path(folder))
            taken = timing.in_turn(runs, args.rounds)
        seconds = {name: statistics.median(each[1:]) for name, each in taken.items()}
        case = f"{args.width}x{out}, rank {args.rank}, {tokens} tokens, {args.dtype}"
        base = seconds["no LoRA"]
        logging.info("%s", case)
        for name, taken in seconds.items():
            logging.info("  %-40s %8.2f ms  %5.2fx", name, taken * 1e3, taken / base)
        milliseconds = {name: round(taken * 1e3, 3) for name, taken in seconds.items()}
        record.append(args.out, "bench_lora", case, milliseconds=milliseconds)


def _memory() -> tuple[str, dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        measured = loading.measure(folder, 40)
    values = {f"{name}_mb": round(nbytes / 1e6, 2) for name, nbytes in measured.items()}
    return "three LoRAs of rank 64, linear layers of Wan 14B, bf16", values


@contextmanager
def _comfyui() -> Iterator[None]:
    """Import ComfyUI with its files in a temporary folder, and run as its nodes do."""
    with tempfile.TemporaryDirectory() as base:
        checkout.import_comfyui(Path(base))
        with torch.inference_mode():
            yield


def _by_way(found: dict[str, list[float]]) -> dict[str, object]:
    """Return the smallest, largest and mean number of each way."""
    return {
        way: {"min": min(each), "max": max(each), "mean": statistics.mean(each)}
        for way, each in found.items()
    }


def _errors() -> tuple[str, dict[str, object]]:
    with _comfyui():
        values = _by_way(lora_errors.fp8_errors())
    return "effect of a LoRA of 1 % of fp8 weights, 20 layers, bf16: error", values


def _bypass_of_comfyui(
    model: lora_ways.Layers, x: Tensor, rank: int, folder: Path
) -> dict[str, Callable[[], Tensor]]:
    """Return a call of ComfyUI's own bypass by name; without ComfyUI an empty dict."""
    if checkout.why_unavailable() is not None:
        return {}
    if "comfy" not in sys.modules:
        with tempfile.TemporaryDirectory() as base:
            checkout.import_comfyui(Path(base))
    from comfy.weight_adapter import bypass
    from comfy.weight_adapter.lora import LoRAAdapter

    bank = lora_ways.bank_of(model, rank, folder)
    manager = bypass.BypassInjectionManager()
    for layer in bank.layers.values():
        down, up = layer.pairs(bank.flat)
        weights = (up.clone(), down.clone(), None, None, None, None)
        manager.add_adapter(layer.target.key, LoRAAdapter(set(), weights), strength=0.8)
    injections = manager.create_injections(model)

    class Patcher:
        """The attributes of a model patcher that an injection reads."""

        load_device = x.device

    patcher = Patcher()
    patcher.model = model

    def run() -> Tensor:
        for injection in injections:
            injection.inject(patcher)
        try:
            return model(x)
        finally:
            for injection in injections:
                injection.eject(patcher)

    return {"ComfyUI's bypass": run}


if __name__ == "__main__":
    main()
