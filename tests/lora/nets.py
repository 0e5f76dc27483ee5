"""Small networks with Wan's parameter names, and LoRA files for them with a float64 oracle."""

import copy

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from fast_video_vae.lora.bank import Amounts, StackEntry, layer_name, load_bank
from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.schedule import parse_schedule
from fast_video_vae.lora.session import Session
from fast_video_vae.tests.lora.models import PREFIX, modules

WIDTH, FFN = 16, 24
EVERY = [(number, "") for number in range(3)]
RANKS = {4: torch.float32, 3: torch.float16, 16: torch.bfloat16}
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
        self.self_attn = nn.ModuleDict({name: linear(WIDTH, WIDTH) for name in "qo"})
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


# Kinds of layers, and modes of applying a delta.
LINEARS = {
    "plain": nn.Linear, "casting": Casting, "ignoring": Ignoring, "by keyword": ByKeyword,
}  # fmt: skip
MODES = ("bypass", "auto", "stream")

# Parts of a weight, a modulation as a whole, and a part of it, by further names.
PARTS = {
    "rows": Target(f"{Q}.weight", (0, 4, 8)),
    "columns": Target(f"{Q}.weight", (1, 2, 6)),
    "table": Target(f"{PREFIX}blocks.0.modulation"),
    "some": Target(f"{PREFIX}blocks.0.modulation", (1, 2, 3)),
}
DORAS = "blocks.0.self_attn.q", "patch_embedding"
# Differences, by the endings of their keys.
DIFFERENCES = {
    ".diff": ("blocks.0.self_attn.o.weight", "blocks.0.norm3.weight", "patch_embedding.weight"),
    ".diff_b": ("blocks.0.norm3.bias", "blocks.1.self_attn.q.bias", "patch_embedding.bias"),
    ".diff_m": ("blocks.2.modulation",),
}


class Stack:
    """Three LoRA files of all modules with `only` in their names, of `RANKS`.

    Without `only` the second file has `PARTS`, `DIFFERENCES` and DoRA's magnitudes of `DORAS` too.
    """

    def __init__(self, folder, model, only=""):
        self.model, self.paths, self.changes = model, [], []
        shapes = model.shapes()
        self.targets = Targets(shapes, PARTS)
        for number, (rank, dtype) in enumerate(RANKS.items()):
            pairs = {n: Target(f"{PREFIX}{n}.weight") for n in modules(shapes) if only in n}
            all_kinds = number == 1 and not only
            tensors, changes = {}, []
            for name, target in (pairs | PARTS if all_kinds else pairs).items():
                out, *inner = self.targets.shape(target)
                up = (0.2 * torch.randn(out, rank)).to(dtype)
                down = (0.2 * torch.randn(rank, *inner)).to(dtype)
                tensors |= {f"{name}.lora_B": up, f"{name}.lora_A": down}
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
                norms = torch.rand(out) + 0.5 if all_kinds and name in DORAS else None
                if norms is not None:
                    tensors[f"{name}.lora_magnitude_vector"] = norms
                delta = 2 / rank * up.double() @ down.double().flatten(1)
                changes.append((target, delta.view(out, *inner), norms))
            for end, keys in DIFFERENCES.items() if all_kinds else ():
                for key in keys:
                    delta = 0.3 * torch.randn(shapes[PREFIX + key])
                    tensors[key.rpartition(".")[0] + end] = delta
                    changes.append((Target(PREFIX + key), delta.double(), None))
            self.paths.append(folder / f"{number}.safetensors")
            save_file(tensors, self.paths[-1])
            self.changes.append(changes)

    def session(self, strengths=(1, 1, 1), mode="auto", entries=()):
        """Return a session with a stack of (file number, block filter); default: all files."""
        bank, schedule = load_bank(self.paths, self.targets), parse_schedule("1")
        entries = [(self.paths[n], parse_blocks(text)) for n, text in entries or EVERY]
        amounts = Amounts(bank, [StackEntry(path, schedule, blocks) for path, blocks in entries])
        amounts.set(strengths)
        return Session(bank, amounts, mode)

    def expected(self, x, strengths=(1, 1, 1), entries=()):
        """Return the dense model's output in float64; `Ignoring` layers go without DoRA."""
        model = copy.deepcopy(self.model).double()
        entries = [(n, parse_blocks(text).factor) for n, text in entries or EVERY]
        for number, changes in enumerate(self.changes):
            for (key, offset), delta, norms in changes:
                weight, name = model.get_parameter(key), layer_name(key)
                if norms is not None:  # the rows of the sum get these norms, as in PEFT
                    if isinstance(model.get_submodule(PREFIX + name), Ignoring):
                        continue
                    rows = (weight + delta).flatten(1)
                    rows *= (norms / rows.norm(dim=1))[:, None]
                    delta = rows.view_as(weight) - weight
                amounts = zip(strengths, entries, strict=True)
                strength = sum(amount * of(name) for amount, (n, of) in amounts if n == number)
                (weight if offset is None else weight.narrow(*offset)).add_(strength * delta)
        return model(x.double())


def called(session, model, x, device=None):
    with session.call(model, device or torch.device("cpu")):
        return model(x)


def assert_close(y, expected):
    assert not torch.isnan(y).any()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5
