"""Linear layers with a LoRA, applied by each method, for the benchmarks on CPUs and GPUs."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fast_video_vae.lora.bank import Bank, load_bank
from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.keys import Targets
from fast_video_vae.lora.schedule import parse_schedule
from fast_video_vae.lora.session import Session
from fast_video_vae.lora.strengths import Amounts, StackEntry

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


def bank_of(model: Layers, rank: int, folder: Path) -> Bank:
    """Return a bank with a random LoRA for all layers of `model`, written to `folder`."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            out, inner = weight.shape
            stem = name.removesuffix(".weight")
            down = torch.randn(rank, inner, generator=generator) / inner**0.5
            tensors[f"{stem}.lora_down.weight"] = down.bfloat16()
            tensors[f"{stem}.lora_up.weight"] = torch.randn(out, rank).bfloat16() * 0.01
    path = folder / "random.safetensors"
    save_file(tensors, path)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    dtype = next(model.parameters()).dtype
    return load_bank([path], Targets(shapes), dtype).to(next(model.parameters()).device)


def ways(model: Layers, x: Tensor, rank: int, folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Return calls on `x` `[1, tokens, in]` by name: without a LoRA, and with each method."""
    bank = bank_of(model, rank, folder)
    entry = StackEntry(bank.files[0].path, parse_schedule("1"), parse_blocks(""))
    amounts = Amounts(bank, [entry])
    amounts.set([0.8])

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
