"""Gated MLPs in every recognised spelling, and similar modules that are not gated MLPs."""

import torch
import torch.nn.functional as F
from torch import nn


class Nest(nn.Module):
    """A network around one module."""

    def __init__(self, module):
        super().__init__()
        self.block = module

    def forward(self, x):
        return self.block(x)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, the base of the variants below."""

    def __init__(self, width=8, hidden=16, bias=True):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class UpFirst(MLP):
    def __init__(self):
        nn.Module.__init__(self)
        self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)


class TwoSteps(MLP):
    def forward(self, hidden_states):
        up = self.up(hidden_states)
        return self.down(up.mul_(F.silu(self.gate(hidden_states), inplace=True)))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.act = nn.Linear(8, 32), nn.Linear(16, 8), nn.SiLU()

    def forward(self, x):
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(self.act(gate) * value)


class SecondHalf(Halves):
    def forward(self, x):
        value, gate = torch.chunk(self.w1(x), 2, -1)
        return self.w2(torch.mul(value, F.silu(gate)))


class GateAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        value, gate = x.chunk(2, -1)
        return value * self.act(gate)


class Saturated(MLP):
    def forward(self, x):
        product = F.silu(self.gate(x)) * self.up(x)
        if product.dtype == torch.float16:
            product = product.nan_to_num(nan=0.0, posinf=65504, neginf=-65504)
        return self.down(product)


GATED = [MLP, UpFirst, TwoSteps, Halves, SecondHalf, GateAlone, Saturated]


class Dropout(MLP):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(super().forward(x))


class OwnScale(MLP):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class OwnForward(MLP):
    """An MLP with a forward that another pack has set on the instance."""

    def __init__(self):
        super().__init__()
        self.forward = lambda x: x


# Other formulas, and forwards that depend on more than the dtype of their input.
FORMULAS = {
    "Scaled": lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x) * 1.5),
    "ScaledBySetting": lambda self, x: MLP.forward(self, x) * self.gate.in_features,
    "Gelu": lambda self, x: self.down(F.gelu(self.gate(x)) * self.up(x)),
    "GateOfProduct": lambda self, x: self.down(F.silu(self.gate(x) * self.up(x))),
    "TiedTwice": lambda self, x: self.down(F.silu(self.gate(x)) * self.gate(x)),
    "Residual": lambda self, x: x + MLP.forward(self, x),
    "OtherEnd": lambda self, x: self.down(
        torch.nan_to_num(F.silu(self.gate(x)) * self.up(x), posinf=1.0)
    ),
    "MoreArguments": lambda self, x, scale=1.0: MLP.forward(self, x),
    "ByValue": lambda self, x: MLP.forward(self, x) if bool((x < 1e6).all()) else x,
    "ByShape": lambda self, x: MLP.forward(self, x) if x.shape[-2] <= 4096 else x,
    "ByMode": lambda self, x: MLP.forward(self, 2 * x if self.training else x),
    "ByWeight": lambda self, x: MLP.forward(self, x.to(self.gate.weight.dtype)),
}

UNLIKE = [
    *(type(name, (MLP,), {"forward": forward}) for name, forward in FORMULAS.items()),
    *(Dropout, OwnScale, OwnForward),
]
