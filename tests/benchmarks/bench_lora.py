"""A LoRA on a linear layer: this pack's modes, ComfyUI's bypass and a merge per call, in one run.

`python tests/benchmarks/bench_lora.py --width 5120 --rank 64 --tokens 4096 512` times them in turn
and appends a JSON row per case to `results.jsonl`. ComfyUI's own bypass is timed where ComfyUI is
installed. `--layers 402 --loras 3 --width 32 --tokens 8` shows what the layers of Wan 14B cost in
Python. `--memory` measures the peak of reading three LoRAs for Wan 14B instead, `--errors` the
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
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fast_video_vae.lora.bank import Bank, load_bank  # noqa: E402
from fast_video_vae.lora.blocks import parse_blocks  # noqa: E402
from fast_video_vae.lora.keys import Targets  # noqa: E402
from fast_video_vae.lora.schedule import parse_schedule  # noqa: E402
from fast_video_vae.lora.session import Session  # noqa: E402
from fast_video_vae.lora.strengths import Amounts, StackEntry  # noqa: E402
from fast_video_vae.tests.benchmarks import lora_errors, lora_loading, record, timing  # noqa: E402
from fast_video_vae.tests.nodes import checkout  # noqa: E402

# Deltas as parts of the weights.
_WEAK = (0.01, 0.003, 0.001, 0.0003)


WAYS = (
    "no LoRA", "auto", "stream", "bypass", "two products, scaled, added", "merge per call",
)  # fmt: skip


class Layers(nn.Module):
    """Linear layers in sequence, as the network of a model; `sizes` are (inputs, outputs)."""

    def __init__(
        self, sizes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.diffusion_model = nn.ModuleList(
            nn.Linear(inner, out, device=device, dtype=dtype) for inner, out in sizes
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers to `x` `[..., in]`."""
        for layer in self.diffusion_model:
            x = layer(x)
        return x


def bank_of(model: Layers, rank: int, folder: Path, loras: int) -> Bank:
    """Return a bank with random LoRAs for all layers of `model`, written to `folder`."""
    generator = torch.Generator().manual_seed(0)
    paths = [folder / f"{number}.safetensors" for number in range(loras)]
    for path in paths:
        tensors = {}
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                out, inner = weight.shape
                stem = name.removesuffix(".weight")
                down = torch.randn(rank, inner, generator=generator) / inner**0.5
                tensors[f"{stem}.lora_down.weight"] = down.bfloat16()
                tensors[f"{stem}.lora_up.weight"] = torch.randn(out, rank).bfloat16() * 0.01
        save_file(tensors, path)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    dtype = next(model.parameters()).dtype
    return load_bank(paths, Targets(shapes), dtype).to(next(model.parameters()).device)


def ways(model: Layers, x: Tensor, bank: Bank) -> dict[str, Callable[[], Tensor]]:
    """Return calls on `x` `[1, tokens, in]` by name: without a LoRA, and with each method."""
    every = parse_schedule("1"), parse_blocks("")
    amounts = Amounts(bank, [StackEntry(file.path, *every) for file in bank.files])
    amounts.set([0.8] * len(bank.files))

    def session(mode: str) -> Callable[[], Tensor]:
        ours = Session(bank, amounts, mode)  # type: ignore[arg-type]

        def run() -> Tensor:
            with ours.call(model, x.device):
                return model(x)

        return run

    pairs = [layer.pairs(bank.flat) for layer in bank.layers.values()]

    def naive() -> Tensor:
        y = x
        for layer, (down, up) in zip(model.diffusion_model, pairs, strict=True):
            y = layer(y) + F.linear(F.linear(y, down), up) * 0.8
        return y

    def merged() -> Tensor:
        y = x
        for layer, (down, up) in zip(model.diffusion_model, pairs, strict=True):
            delta = torch.mm(up, down) * 0.8
            y = F.linear(y, layer.weight + delta, layer.bias)
        return y

    runs = [lambda: model(x), *map(session, ("auto", "stream", "bypass")), naive, merged]
    return dict(zip(WAYS, runs, strict=True))


def main() -> None:
    """Time every number of tokens."""
    parser = record.parser(__doc__)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--leave", type=int, help="output features of the layer (default: --width)")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--loras", type=int, default=1)
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
    model = Layers([(args.width, out)] * args.layers, device, dtype)
    for tokens in args.tokens:
        x = torch.randn(1, tokens, args.width, device=device).to(dtype)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            bank = bank_of(model, args.rank, Path(folder), args.loras)
            runs = ways(model, x, bank) | _bypass_of_comfyui(model, x, bank)
            taken = timing.in_turn(runs, args.rounds)
        seconds = {name: statistics.median(each[1:]) for name, each in taken.items()}
        case = f"{args.width}x{out}, rank {args.rank}, {tokens} tokens, {args.dtype}"
        if args.layers > 1:
            sizes = f"{args.width}x{out}, {args.dtype}, an input of {tokens} x {args.width}"
            case = f"a call of {args.layers} layers with {args.loras} LoRAs, {sizes}"
        base = seconds["no LoRA"]
        logging.info("%s", case)
        for name, taken in seconds.items():
            logging.info("  %-40s %8.2f ms  %5.2fx", name, taken * 1e3, taken / base)
        milliseconds = {name: round(taken * 1e3, 3) for name, taken in seconds.items()}
        record.append(args.out, "bench_lora", case, milliseconds=milliseconds)


def _memory() -> tuple[str, dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        measured = lora_loading.measure(folder, 40)
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


def _bypass_of_comfyui(model: Layers, x: Tensor, bank: Bank) -> dict[str, Callable[[], Tensor]]:
    """Return a call of ComfyUI's own bypass by name; without ComfyUI an empty dict."""
    if checkout.why_unavailable() is not None:
        return {}
    if "comfy" not in sys.modules:
        with tempfile.TemporaryDirectory() as base:
            checkout.import_comfyui(Path(base))
    from comfy.weight_adapter import bypass
    from comfy.weight_adapter.lora import LoRAAdapter

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
