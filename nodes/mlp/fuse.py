"""The gated MLPs of a diffusion model, with the gate in one pass.

Written out, `silu(gate) * up` reads and writes the hidden activation, the largest of a block, five
times and keeps three copies. `kernels.silu_mul` reads and writes three times, and overwrites
`gate`.
"""

import functools
import logging
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...kernels import silu_mul_by_kernel
from .swiglu import Wiring, recognise, saturated

_logger = logging.getLogger(__name__)

_NETWORK = "diffusion_model"


def fuse(model: ModelPatcher) -> ModelPatcher:
    """Return a clone of `model` with fused MLPs as object patches, or `model` if it has none."""
    patches: dict[str, type[nn.Module]] = {}
    counts: Counter[str] = Counter()
    network = getattr(model.model, _NETWORK, None)
    is_module = isinstance(network, nn.Module)  # not another pack's inference engine
    for name, module in network.named_modules(prefix=_NETWORK) if is_module else ():
        key = f"{name}.__class__"
        # Not `type(module)`: the module may have the patches of another clone.
        stock = model.get_model_object(key)
        wiring = None if issubclass(stock, FusedMLP) else recognise(module, stock)
        if wiring is not None:
            patches[key] = fused(stock, wiring)
            counts[stock.__name__] += 1
    if not patches:
        _logger.info(
            "Fast Video VAE: %s has no SwiGLU MLPs to fuse; the model is unchanged",
            type(model.model).__name__,
        )
        return model
    clone = model.clone()
    for key, patch in patches.items():
        clone.add_object_patch(key, patch)
    _logger.info(
        "Fast Video VAE: fused the SwiGLU MLPs of %s: %s",
        type(model.model).__name__,
        ", ".join(f"{count} {name}" for name, count in counts.items()),
    )
    return clone


class FusedMLP:
    """Base of the classes that `fused` creates."""


# The class is replaced, as by PyTorch's parametrizations and `fully_shard`, not `forward`: it
# refers to no module, so it works for every copy of a model on any device, and ComfyUI, which
# restores what it read before, leaves nothing behind. Its forward calls the children, so that
# patched and quantised weights, offloading and hooks keep working.
@functools.cache
def fused(cls: type[nn.Module], wiring: Wiring) -> type[nn.Module]:
    """Return the fused subclass of a gated MLP; equal arguments return the same class."""

    # By position, or under the name that the class uses.
    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which fuses the module's own code
            return cls.forward(self, *args, **named)
        (x,) = (*args, *named.values())
        product = _product(self, wiring, x)
        return product if wiring.down is None else getattr(self, wiring.down)(product)

    return type(f"Fused{cls.__name__}", (FusedMLP, cls), {"forward": forward})


def _product(module: Any, wiring: Wiring, x: Tensor) -> Tensor:  # noqa: ANN401, has the children
    """Return the input of `down`, in the memory of a projection's result if possible."""
    out = None
    if len(wiring.projections) == 2:
        first, second = (getattr(module, name) for name in wiring.projections)
        watched = bool(first._forward_hooks)  # a hook may have kept the result
        parts = first(x), second(x)
        if not (watched or any(part.requires_grad for part in parts)):
            out = parts[0]
    else:
        whole = getattr(module, wiring.projections[0])(x) if wiring.projections else x
        parts = whole.chunk(2, -1)
    gate, value = parts[wiring.gate], parts[1 - wiring.gate]
    product = None
    # A patched layer may return another dtype, and the formula returns the wider one.
    if (gate.shape, gate.dtype, gate.device) == (value.shape, value.dtype, value.device):
        product = silu_mul_by_kernel(gate, value, out)
    if product is None:
        product = F.silu(gate, inplace=out is gate)
        like = (product.shape, product.dtype) == (value.shape, value.dtype)
        alone = like and not (product.requires_grad or value.requires_grad)
        product = product.mul_(value) if alone else product * value
    return saturated(product) if product.dtype in wiring.saturates else product
