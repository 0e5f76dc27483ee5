"""Small networks with Wan's parameter names, and LoRA files for them with their float64 deltas.

Their linear layers are plain, or cast their weights as ComfyUI's layers do.
"""

import copy
from collections import Counter

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.lora.session import Session
from fast_video_vae.tests.lora.models import PREFIX, amounts_of, modules, random_pairs, spelled
from fast_video_vae.tests.products import each_value_once

WIDTH, FFN, HEAD = 16, 24, 8
CPU = torch.device("cpu")
Q = f"{PREFIX}blocks.1.self_attn.q"


class Casting(nn.Linear):
    """A layer that applies functions to its weight and bias after it has cast them."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight_function, self.bias_function = [], []

    def forward(self, x):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        for function in self.weight_function:
            weight = function(weight)
        for function in self.bias_function:
            bias = function(bias)
        return F.linear(x, weight, bias)


class Ignoring(Casting):
    """A layer that has the lists of functions but does not apply them, like GGUF's layers."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.q = linear(WIDTH, WIDTH)
        self.self_attn.o = linear(WIDTH, WIDTH)
        self.norm3 = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(linear(WIDTH, FFN), nn.Tanh(), linear(FFN, WIDTH))
        self.modulation = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(self, x):
        shift, gain = self.modulation[:, 0], self.modulation[:, 1]
        x = x + self.self_attn.o(torch.sin(self.self_attn.q(x)))
        return x + gain * self.ffn(self.norm3(x) + shift)


class Network(nn.Module):
    def __init__(self, linear=nn.Linear, blocks=3):
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, WIDTH, (1, 2, 2), stride=(1, 2, 2))
        self.blocks = nn.ModuleList([Block(linear) for _ in range(blocks)])
        self.head = linear(WIDTH, HEAD)

    def forward(self, video):
        x = self.patch_embedding(video).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Model(nn.Module):
    """A network in the attribute `diffusion_model`, as in ComfyUI's models."""

    def __init__(self, linear=nn.Linear, blocks=3, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.diffusion_model = Network(linear, blocks)
        self.requires_grad_(False)

    def forward(self, video):
        return self.diffusion_model(video)

    def shapes(self):
        return {key: tuple(value.shape) for key, value in self.state_dict().items()}


def video(side=8, frames=2, batch=1):
    """Return random videos `[batch, 4, frames, side, side]`: `frames * (side / 2) ** 2` tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, frames, side, side, generator=generator)


def dense(model, changes):
    """Return a copy of the model in float64 with `changes`, `{key: delta}`, added."""
    other = copy.deepcopy(model).double()
    for key, change in changes.items():
        value = other.get_parameter(key)
        value += change.view(value.shape)
    return other


# Kinds of layers, and modes of applying a delta.
LINEARS = {"plain": nn.Linear, "casting": Casting, "ignoring": Ignoring}
MODES = ("stream", "auto", "bypass")
each_way = each_value_once(linear=LINEARS, mode=MODES)


class Stack:
    """LoRA files for a model, and their deltas in float64.

    `only`: part of the names of the modules; `whole`: the second file also has whole differences.
    """

    def __init__(self, folder, model, ranks=(4, 3, 16), whole=True, only=""):
        self.shapes, self.folder = model.shapes(), folder
        self.paths, self.deltas = [], []
        names = [name for name in modules(self.shapes) if only in name]
        for number, rank in enumerate(ranks):
            pairs = random_pairs(self.shapes, names, rank, seed=number)
            pairs = {name: (0.2 * up, 0.2 * down) for name, (up, down) in pairs.items()}
            tensors = spelled(pairs, alpha=2)
            exact = {name: [part.double().flatten(1) for part in pairs[name]] for name in pairs}
            deltas = {
                f"{PREFIX}{name}.weight": 2 / rank * up @ down for name, (up, down) in exact.items()
            }
            if whole and number == 1:
                self._kronecker(tensors, deltas)
                for key, delta in self._differences(tensors).items():
                    both = key in deltas
                    deltas[key] = deltas[key] + delta.flatten(1) if both else delta
            self.paths.append(folder / f"{number}.safetensors")
            save_file(tensors, self.paths[-1])
            self.deltas.append(deltas)
        self.targets = Targets(self.shapes)

    def _kronecker(self, tensors, deltas):
        """Put a LoKr in the place of the pair of a layer."""
        stem, generator = f"{PREFIX}blocks.0.self_attn.o", torch.Generator().manual_seed(8)
        for key in [key for key in tensors if key.startswith(f"{stem}.")]:
            del tensors[key]
        factors = [0.3 * torch.randn(4, 4, generator=generator) for _ in range(2)]
        tensors[f"{stem}.lokr_w1"], tensors[f"{stem}.lokr_w2"] = factors[0], factors[1].half()
        deltas[f"{stem}.weight"] = torch.kron(factors[0].double(), factors[1].half().double())

    def _differences(self, tensors):
        """Add differences of norms, biases, a modulation and a weight with a pair; return them."""
        generator = torch.Generator().manual_seed(9)
        keys = {
            f"{PREFIX}blocks.0.norm3.diff": f"{PREFIX}blocks.0.norm3.weight",
            f"{PREFIX}blocks.0.norm3.diff_b": f"{PREFIX}blocks.0.norm3.bias",
            f"{Q}.diff_b": f"{Q}.bias",
            f"{PREFIX}blocks.2.diff_m": f"{PREFIX}blocks.2.modulation",
            f"{PREFIX}patch_embedding.diff": f"{PREFIX}patch_embedding.weight",
            f"{PREFIX}patch_embedding.diff_b": f"{PREFIX}patch_embedding.bias",
        }
        for name, key in keys.items():
            tensors[name] = 0.3 * torch.randn(self.shapes[key], generator=generator)
        return {key: tensors[name].double() for name, key in keys.items()}

    def session(self, strengths, mode="auto", blocks="", **more):
        bank = load_bank(self.paths, self.targets)
        return session_of(bank, strengths, mode, blocks, **more)

    def oracle(self, model, strengths):
        total = Counter()
        for strength, deltas in zip(strengths, self.deltas, strict=True):
            for key, delta in deltas.items():
                total[key] = total[key] + strength * delta
        return dense(model, total)


def session_of(bank, strengths, mode="auto", blocks="", **more):
    """Return a session with all files of a bank."""
    amounts = amounts_of(bank, *((number, blocks) for number in range(len(bank.files))))
    amounts.set(strengths)
    return Session(bank, amounts, mode, **more)


def called(session, model, x):
    with session.call(model, CPU):
        return model(x)


def assert_close(y, expected):
    assert not torch.isnan(y).any()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5
