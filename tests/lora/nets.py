"""Small networks with the names of Wan, of plain layers or of layers that cast as ComfyUI's do."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, FFN, HEAD = 16, 24, 8


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
    """A layer that has the lists and does not look at them, as GGUF's."""

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
    """A network where ComfyUI has it."""

    def __init__(self, linear=nn.Linear, blocks=3, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.diffusion_model = Network(linear, blocks)
        self.requires_grad_(False)

    def forward(self, video):
        return self.diffusion_model(video)

    def shapes(self):
        return {key: tuple(value.shape) for key, value in self.state_dict().items()}


def video(side=8, frames=2, batch=1, dtype=torch.float32):
    """As many tokens as `frames * (side / 2) ** 2` in each of a batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, frames, side, side, generator=generator).to(dtype)


def dense(model, changes):
    """A copy in float64 with `changes`, `{key: what is added}`."""
    other = copy.deepcopy(model).double()
    for key, change in changes.items():
        value = other.get_parameter(key)
        value += change.view(value.shape)
    return other
