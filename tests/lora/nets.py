"""Small networks with Wan's parameter names, and LoRA files for them with their float64 deltas."""

import copy

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.schedule import parse_schedule
from fast_video_vae.lora.session import Session
from fast_video_vae.lora.strengths import Amounts, StackEntry, layer_name
from fast_video_vae.tests.lora.models import PREFIX, modules
from fast_video_vae.tests.products import each_value_once

WIDTH, FFN = 16, 24
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


class ByKeyword(nn.Linear):
    def __call__(self, x):
        return super().__call__(input=x)


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


class Model(nn.Module):
    """A network in the attribute `diffusion_model`, as in ComfyUI's models."""

    def __init__(self, linear=nn.Linear, blocks=3, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.diffusion_model = network = nn.Module()
        network.patch_embedding = nn.Conv3d(4, WIDTH, (1, 2, 2), stride=(1, 2, 2))
        network.blocks = nn.Sequential(*(Block(linear) for _ in range(blocks)))
        network.head = linear(WIDTH, 8)
        self.requires_grad_(False)

    def forward(self, video):
        network = self.diffusion_model
        return network.head(network.blocks(network.patch_embedding(video).flatten(2).mT))

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
        other.get_parameter(key).add_(change)
    return other


# Kinds of layers, and modes of applying a delta.
LINEARS = {
    "plain": nn.Linear, "casting": Casting, "ignoring": Ignoring, "by keyword": ByKeyword,
}  # fmt: skip
MODES = ("bypass", "auto", "stream")
each_way = each_value_once(linear=LINEARS, mode=MODES)

# Further names of the tests: parts of a weight, a modulation as a whole, and a part of it.
PARTS = {
    "rows": Target(f"{Q}.weight", (0, 4, 8)),
    "columns": Target(f"{Q}.weight", (1, 2, 6)),
    "table": Target(f"{PREFIX}blocks.0.modulation"),
    "some": Target(f"{PREFIX}blocks.0.modulation", (1, 2, 3)),
}
# Differences in a file, and the parameters that they are of.
DIFFERENCES = {
    "blocks.0.self_attn.o.diff": "blocks.0.self_attn.o.weight",
    "blocks.0.norm3.diff": "blocks.0.norm3.weight",
    "blocks.0.norm3.diff_b": "blocks.0.norm3.bias",
    "blocks.1.self_attn.q.diff_b": "blocks.1.self_attn.q.bias",
    "blocks.2.diff_m": "blocks.2.modulation",
    "patch_embedding.diff": "patch_embedding.weight",
    "patch_embedding.diff_b": "patch_embedding.bias",
}


class Stack:
    """Three LoRA files with pairs of all modules; the second has `PARTS` and `DIFFERENCES` too.

    With `only`, a part of the names of modules, they are pairs of these modules.
    """

    def __init__(self, folder, model, only=""):
        self.model, self.paths, self.deltas = model, [], []
        shapes = model.shapes()
        self.targets = Targets(shapes, PARTS)
        names = [name for name in modules(shapes) if only in name]
        ranks = {4: torch.float32, 3: torch.float16, 16: torch.bfloat16}
        for number, (rank, dtype) in enumerate(ranks.items()):
            pairs, others = {name: Target(f"{PREFIX}{name}.weight") for name in names}, {}
            if number == 1 and not only:
                pairs, others = pairs | PARTS, DIFFERENCES
            tensors, deltas = {}, {key: torch.zeros(shapes[key]).double() for key in shapes}
            for name, target in pairs.items():
                out, *inner = self.targets.shape(target)
                sizes = (out, rank), (rank, *inner)
                up, down = (0.2 * torch.randn(size).to(dtype) for size in sizes)
                tensors |= {f"{name}.lora_B": up, f"{name}.lora_A": down}
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
                delta = deltas[target.key]
                part = delta.narrow(*(target.offset or (0, 0, out)))
                part += (2 / rank * up.double() @ down.double().flatten(1)).view(part.shape)
            for name, key in others.items():
                tensors[name] = 0.3 * torch.randn(shapes[PREFIX + key])
                deltas[PREFIX + key] += tensors[name]
            self.paths.append(folder / f"{number}.safetensors")
            save_file(tensors, self.paths[-1])
            self.deltas.append(deltas)

    def session(self, strengths=(1, 1, 1), mode="auto", entries=(), **more):
        bank = load_bank(self.paths, self.targets)
        return session_of(bank, strengths, mode, entries, **more)

    def expected(self, x, strengths=(1, 1, 1), entries=()):
        """Return the output of the dense model for `x`, of a stack as in `session_of`."""
        changes = {key: torch.zeros_like(delta) for key, delta in self.deltas[0].items()}
        entries = entries or [(number, "") for number in range(len(self.paths))]
        for strength, (number, text) in zip(strengths, entries, strict=True):
            factor = parse_blocks(text).factor
            for key, delta in self.deltas[number].items():
                changes[key] += strength * factor(layer_name(key)) * delta
        return dense(self.model, changes)(x.double())


def session_of(bank, strengths, mode="auto", entries=(), **more):
    """Return a session with a stack of (file number, block filter); default: all files."""
    entries = entries or [(number, "") for number in range(len(bank.files))]
    every = parse_schedule("1")
    stack = [StackEntry(bank.files[n].path, every, parse_blocks(text)) for n, text in entries]
    amounts = Amounts(bank, stack)
    amounts.set(strengths)
    return Session(bank, amounts, mode, **more)


def called(session, model, x):
    with session.call(model, torch.device("cpu")):
        return model(x)


def assert_close(y, expected):
    assert not torch.isnan(y).any()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5
