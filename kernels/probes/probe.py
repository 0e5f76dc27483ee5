"""Measure the rate of products on a device, and the two ways to apply a LoRA to a layer.

`lora/apply.py` has the two ways and their break-even, `n = c * in * out / (in + 2 * out)` tokens.
The measured `c` differs by a factor of two between layers and ranks, and with the load of the
machine. It is rounded to a power of two, so that noise of less than 40 % around one does not change
the way that a layer takes. With a break-even that is wrong by 40 %, a layer near it spends at most
1.4 times the time on its LoRA.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import measure

# Dtypes of a LoRA's products. A CPU multiplies others too, a thousand times slower.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# If nothing can be measured: a weight is read and written twice, as by `torch.addmm`.
UNMEASURED_C = 4.0

# Values of `c`: 0.25 to 64. Measured on a CPU: 1.5 to 5 in float32 and bfloat16, 14 in float16.
GRID = tuple(2.0**power for power in range(-2, 7))

# Possible multiply-adds per second: less than one slow core, more than a thousand GPUs.
RATES = (1e4, 1e18)

# Rank of a common LoRA.
_RANK = 32

# Most rounds, and seconds after which none begins: with the warm-up, a second on two slow cores.
# On a GPU a round takes some 20 ms.
_ROUNDS, _LIMIT_S = 5, 0.4

# A CPU on which a warm-up and one round of all layers take longer measures the first layer only.
_MOST_S = 1.0

# Random values, which are repeated: making them takes longer than a product.
_VALUES = 1 << 16


class Probe(NamedTuple):
    """The result of a probe.

    Attributes:
        products_per_s: Multiply-adds per second of a large product, to two digits.
        stream_c: `c`, a value of `GRID`.
    """

    products_per_s: float
    stream_c: float


class _Sizes(NamedTuple):
    """The measured layers: square as in attention, wide and tall as in a feed-forward.

    Attributes:
        layers: Inputs and outputs of each, the smallest first.
        tokens: Tokens of a call, near the break-even: a busy machine slows two calls that take as
            long by the same factor, but delays a short one and a long one by the same time.
        product_tokens: Tokens that are multiplied by the first weight.
        repeats: Calls that are timed together.
    """

    layers: tuple[tuple[int, int], ...]
    tokens: int
    product_tokens: int
    repeats: int


# Weights larger than most caches, as those of a whole model are; about 0.3 GiB of bfloat16 on a
# GPU. The break-even is at 1,400 to 4,100 tokens on a CPU of `c` 2 to 4, and at 5,500 to 8,200 on a
# GPU of 4.
_ON_CPU = _Sizes(((2048, 2048), (2048, 4096), (4096, 2048)), 2048, 128, 1)
_ON_GPU = _Sizes(((4096, 4096), (4096, 8192), (8192, 4096)), 6144, 4096, 5)

_Calls = dict[tuple[str, int], Callable[[], Tensor]]


def measured(device: torch.device, dtype: torch.dtype) -> Probe:
    """Measure `device` with `dtype`: at most about a second on slow CPUs, 0.2 s on a GPU.

    Args:
        device: The device.
        dtype: Dtype of activations, weights and LoRA.

    Returns:
        The result.

    Raises:
        RuntimeError: The device does not support the dtype, memory is short, or the times are
            impossible.
        TypeError: The device cannot hold the dtype.
        MemoryError: Memory is short.
    """
    sizes = _ON_CPU if device.type == "cpu" else _ON_GPU
    clock = partial(measure.seconds, device=device, launches=False, repeats=sizes.repeats)
    with torch.inference_mode():
        calls = _calls(device, dtype, sizes)
        first = {key: call for key, call in calls.items() if key[1] == 0}
        seconds = _checked(clock(first, rounds=1))
        inner, out = sizes.layers[0]
        rate = sizes.product_tokens * inner * out / seconds.pop(("product", 0))
        # The other layers have twice the elements, so a round takes five times as long.
        slow = device.type == "cpu" and 2 * 5 * sum(seconds.values()) > _MOST_S
        calls = first if slow else calls
        del calls["product", 0]
        seconds = _checked(clock(calls, rounds=_ROUNDS, limit_s=_LIMIT_S))
    if not RATES[0] <= rate <= RATES[1]:
        raise RuntimeError(f"measured {rate:.1e} products per second")
    constants = [
        sizes.tokens * seconds["stream", n] / seconds["bypass", n] * (inner + 2 * out) / inner / out
        for n, (inner, out) in enumerate(sizes.layers)
        if ("stream", n) in seconds
    ]
    return Probe(float(f"{rate:.1e}"), on_grid(constants))


def on_grid(constants: Iterable[float]) -> float:
    """Return the value of `GRID` nearest to the median of the layers' `constants`, by ratio."""
    power = math.log2(statistics.median(constants))
    return min(GRID, key=lambda value: abs(math.log2(value) - power))


def _calls(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> _Calls:
    """Return a product of the first layer, and both ways in all layers, which share memory."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_VALUES, generator=generator, device="cpu") / 8
    values = values.to(device, dtype)

    def made(count: int) -> Tensor:
        return values.repeat(-(-count // _VALUES))

    most = max(max(layer) for layer in sizes.layers)
    weights = made(max(inner * out for inner, out in sizes.layers))
    xs, ys, pairs = made(sizes.tokens * most), made(sizes.tokens * most), made(_RANK * most)
    calls: _Calls = {}
    for n, (inner, out) in enumerate(sizes.layers):
        weight, x = _view(weights, out, inner), _view(xs, sizes.tokens, inner)
        y = _view(ys, sizes.tokens, out)
        down, up = _view(pairs, _RANK, inner), _view(pairs, out, _RANK)
        if n == 0:
            few = sizes.product_tokens
            calls["product", n] = partial(torch.mm, x[:few], weight.T, out=y.new_empty(few, out))
        calls["stream", n] = partial(torch.addmm, weight, up, down)
        calls["bypass", n] = partial(_bypass, y, x, down, up)
    return calls


def _view(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def _bypass(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return y.addmm_(x @ down.T, up.T)


def _checked(seconds: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    for (name, _), value in seconds.items():
        if not (value > 0 and math.isfinite(value)):
            raise RuntimeError(f"measured {value} s for a call of {name}")
    return seconds
