"""A LoRA on a linear layer: this pack's modes, ComfyUI's bypass and a merge per call, in one run.

`python tests/benchmarks/bench_lora.py --width 5120 --rank 64 --tokens 4096 512` times them in turn
and appends a JSON row per case to `results.jsonl`. ComfyUI's own bypass is timed where ComfyUI is
installed. `--layers 402 --loras 3 --width 32 --tokens 8` shows what the layers of Wan 14B cost in
Python.
"""

import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import bind  # noqa: F401
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fast_video_vae import lora
from fast_video_vae.lora import Bank
from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.nodes import checkout


class Layers(nn.Module):
    """Linear layers in sequence, as the network of a model."""

    def __init__(self, count: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = record.best_device()
        layers = (nn.Linear(width, width, device=device, dtype=dtype) for _ in range(count))
        self.diffusion_model = nn.ModuleList(layers)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers to `x` `[..., in]`."""
        for layer in self.diffusion_model:
            x = layer(x)
        return x


def bank_of(model: Layers, rank: int, loras: int) -> Bank:
    """Return a bank with random LoRAs for all layers of `model`."""
    weights = {name: each for name, each in model.named_parameters() if each.ndim == 2}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(loras)]
        for path in paths:
            tensors = {}
            for name, weight in weights.items():
                (out, inner), stem = weight.shape, name.removesuffix(".weight")
                down = torch.randn(rank, inner) / inner**0.5
                tensors[f"{stem}.lora_down.weight"] = down.bfloat16()
                tensors[f"{stem}.lora_up.weight"] = torch.randn(out, rank).bfloat16() * 0.01
            save_file(tensors, path)
        targets = lora.Targets({name: tuple(each.shape) for name, each in weights.items()})
        weight = next(iter(weights.values()))
        return lora.load_bank(paths, targets, weight.dtype).to(weight.device)


def ways(model: Layers, x: Tensor, bank: Bank) -> dict[str, Callable[[], Tensor]]:
    """Return calls on `x` `[1, tokens, in]` by name: without a LoRA, and with each method."""
    every = lora.parse_schedule("1"), lora.parse_blocks("")
    amounts = lora.Amounts(bank, [lora.StackEntry(file.path, *every) for file in bank.files])
    amounts.set([0.8] * len(bank.files))

    def session(mode: str) -> Callable[[], Tensor]:
        ours = lora.Session(bank, amounts, mode)  # type: ignore[arg-type]

        def run() -> Tensor:
            with ours.call(model, x.device):
                return model(x)

        return run

    pairs = [layer.pairs(bank.flat, x.device) for layer in bank.layers.values()]

    def merged() -> Tensor:
        y = x
        for layer, (down, up) in zip(model.diffusion_model, pairs, strict=True):
            y = F.linear(y, layer.weight + torch.mm(up, down) * 0.8, layer.bias)
        return y

    runs = {mode: session(mode) for mode in ("auto", "stream", "bypass")}
    return {"no LoRA": lambda: model(x), **runs, "merge per call": merged}


def main() -> None:
    """Time every number of tokens."""
    args = record.parser(
        __doc__, width=5120, layers=1, loras=1, rank=64, tokens=[4096, 512], rounds=9,
        dtype="bfloat16",
    ).parse_args()  # fmt: skip
    dtype = getattr(torch, args.dtype)
    model = Layers(args.layers, args.width, dtype)
    for tokens in args.tokens:
        x = torch.randn(1, tokens, args.width, device=record.best_device()).to(dtype)
        with torch.inference_mode():
            bank = bank_of(model, args.rank, args.loras)
            runs = ways(model, x, bank) | _bypass_of_comfyui(model, x, bank)
            taken = record.after_first(record.in_turn(runs, args.rounds))
        seconds = {name: statistics.median(each) for name, each in taken.items()}
        sizes = f"{args.width}x{args.width}"
        case = f"{sizes}, rank {args.rank}, {tokens} tokens, {args.dtype}"
        if args.layers > 1:
            given = f"{sizes}, {args.dtype}, an input of {tokens} x {args.width}"
            case = f"a call of {args.layers} layers with {args.loras} LoRAs, {given}"
        logging.info("%s", case)
        for name, each in seconds.items():
            logging.info("  %-40s %8.2f ms  %5.2fx", name, each * 1e3, each / seconds["no LoRA"])
        milliseconds = {name: round(each * 1e3, 3) for name, each in seconds.items()}
        record.append(args.out, "bench_lora", case, milliseconds=milliseconds)


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
        down, up = layer.pairs(bank.flat, x.device)
        weights = (up.clone(), down.clone(), None, None, None, None)
        manager.add_adapter(layer.target.key, LoRAAdapter(set(), weights), strength=0.8)
    injections = manager.create_injections(model)
    patcher = SimpleNamespace(load_device=x.device, model=model)  # what an injection reads

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
