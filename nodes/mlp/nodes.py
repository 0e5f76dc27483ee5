"""The node that runs the gate of a model's MLPs, `down(silu(gate(x)) * up(x))`, in one pass.

Written out, `silu(gate) * up` reads and writes the hidden activation, the largest of a block, five
times and keeps three copies. `kernels.silu_mul` reads and writes three times, and overwrites
`gate`. (Shazeer, "GLU Variants Improve Transformer", 2020.)
"""

import functools
import logging
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..host.api import io
from ..host.input_checks import checked
from ..host.lazy import Later

kernels = Later("kernels")

_logger = logging.getLogger(__name__)

_NETWORK = "diffusion_model"


class Wiring(NamedTuple):
    """The layers of a gated MLP; its other children are SiLUs."""

    # The gate's and the other; or one, whose result has both as halves; or none: the input has.
    projections: tuple[str, ...] = ()
    down: str | None = None  # takes the product; None: there is none
    gate: int = 0  # the part that passes SiLU
    saturates: bool = False  # float16 infinities are clamped, and NaN is set to zero


# All gated MLPs of the diffusion models of ComfyUI 0.33, and of the encoders inside them.
WIRINGS = {
    "comfy.image_encoders.dino2.SwiGLUFFN": Wiring(("weights_in",), "weights_out"),
    "comfy.ldm.ace.ace_step15.MLP": Wiring(("gate_proj", "up_proj"), "down_proj"),
    "comfy.ldm.audio.dit.GLU": Wiring(("proj",), gate=1),
    "comfy.ldm.aura.mmdit.MLP": Wiring(("c_fc1", "c_fc2"), "c_proj"),
    "comfy.ldm.flux.layers.SiLUActivation": Wiring(),
    "comfy.ldm.flux.layers.YakMLP": Wiring(("gate_proj", "up_proj"), "down_proj"),
    "comfy.ldm.genmo.joint_model.layers.FeedForward": Wiring(("w1",), "w2"),
    "comfy.ldm.hidream.model.FeedForwardSwiGLU": Wiring(("w1", "w3"), "w2"),
    "comfy.ldm.krea2.model.SwiGLU": Wiring(("gate", "up"), "down"),
    "comfy.ldm.lens.model.GateMLP": Wiring(("w1", "w3"), "w2"),
    "comfy.ldm.lumina.model.FeedForward": Wiring(("w1", "w3"), "w2", saturates=True),
    "comfy.ldm.minimax_music.dit.GLU": Wiring(("proj",), gate=1),
    "comfy.ldm.modules.diffusionmodules.mmdit.SwiGLUFeedForward": Wiring(("w1", "w3"), "w2"),
    "comfy.ldm.omnigen.omnigen2.LuminaFeedForward": Wiring(("linear_1", "linear_3"), "linear_2"),
    "comfy.ldm.seedvr.model.SwiGLUMLP": Wiring(("proj_in_gate", "proj_in"), "proj_out"),
    "comfy.text_encoders.llama.MLP": Wiring(("gate_proj", "up_proj"), "down_proj"),
}


class FuseMLP(io.ComfyNode):
    """Run each gated MLP of a model in one pass."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_FuseMLP",
            display_name="Fuse SwiGLU MLPs (Fast)",
            category="Fast VAE",
            description="Makes the SiLU-gated MLPs of a diffusion model faster, with less "
            "memory: SeedVR2, Lumina 2, Z-Image, HiDream, OmniGen 2, Mochi, Flux 2 and others. "
            "LoRAs, offloading and quantised weights work as before. Models without such MLPs "
            "are returned unchanged; the log says so.",
            search_aliases=["swiglu", "fuse mlp", "fast mlp", "speed up model", "feed forward"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="Diffusion model. The input model is not "
                    "modified; the weights are shared.",
                )
            ],
            outputs=[io.Model.Output(display_name="MODEL")],
        )

    @classmethod
    @checked
    def execute(cls, model: ModelPatcher) -> io.NodeOutput:
        """Patch a clone."""
        return io.NodeOutput(fuse(model))


def fuse(model: ModelPatcher) -> ModelPatcher:
    """Return a clone of `model` with fused MLPs as object patches, or `model` if it has none."""
    name, counts, clone = type(model.model).__name__, Counter(), model.clone()
    network = getattr(model.model, _NETWORK, None)
    is_module = isinstance(network, nn.Module)  # not another pack's inference engine
    for path, module in network.named_modules(prefix=_NETWORK) if is_module else ():
        key = f"{path}.__class__"
        # Not `type(module)`: the module may have the patches of another clone.
        cls = model.get_model_object(key)
        if _is_known(module, cls):
            clone.add_object_patch(key, _fused(cls))
            counts[cls.__name__] += 1
    if not counts:
        _logger.info("Fast Video VAE: %s has no SwiGLU MLPs to fuse; the model is unchanged", name)
        return model
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    _logger.info("Fast Video VAE: fused the SwiGLU MLPs of %s: %s", name, kinds)
    return clone


# The weights are not accessed: they may be offloaded, quantised or on another device.
def _is_known(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether `module` runs ComfyUI's own code of a class in the table, with its layers."""
    wiring = WIRINGS.get(f"{cls.__module__}.{cls.__qualname__}")
    if wiring is None:
        return False
    # Other packs replace the methods of a class, or hide them by attributes of an instance.
    home = vars(sys.modules[cls.__module__])
    methods = [each for each in vars(cls).values() if callable(each)]
    stock = all(getattr(each, "__globals__", None) is home for each in methods)
    if not stock or home.get(cls.__name__) is not cls or vars(cls).keys() & vars(module).keys():
        return False
    # Other releases of ComfyUI may have other layers.
    layers = {name: each for name, each in module.named_children() if type(each) is not nn.SiLU}
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    names = {*wiring.projections, *filter(None, [wiring.down])}
    linear = all(hasattr(each, "in_features") for each in layers.values())
    if own or layers.keys() != names or not linear:
        return False
    parts = [layers[name] for name in wiring.projections]
    sizes = {(each.in_features, each.out_features * len(parts)) for each in parts}
    down = layers.get(wiring.down)
    fits = len(sizes) < 2 if down is None else sizes == {(down.out_features, 2 * down.in_features)}
    return fits and getattr(module, "activation", F.silu) is F.silu  # Llama's may be GELU


# The class is replaced, as by PyTorch's parametrizations and `fully_shard`, not `forward`: it
# refers to no module, so it works for every copy of a model on any device, and ComfyUI, which
# restores what it read before, leaves nothing behind. Its forward calls the children, so that
# patched and quantised weights, offloading and hooks keep working.
@functools.cache
def _fused(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the fused subclass of a class in the table, always the same."""
    wiring = WIRINGS[f"{cls.__module__}.{cls.__qualname__}"]

    # By position, or under the name that the class uses.
    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which fuses the module's own code
            return cls.forward(self, *args, **named)
        product = _product(self, wiring, *args, *named.values())
        return product if wiring.down is None else getattr(self, wiring.down)(product)

    return type(f"Fused{cls.__name__}", (cls,), {"forward": forward})


def _product(module: Any, wiring: Wiring, x: Tensor) -> Tensor:  # noqa: ANN401, has the children
    """Return the input of `down`, in the memory of the gate if possible."""
    parts, out = [getattr(module, name)(x) for name in wiring.projections] or [x], None
    if len(parts) == 1:
        parts = parts[0].chunk(2, -1)
    elif not getattr(module, wiring.projections[0])._forward_hooks:  # which may keep the result
        out = None if any(part.requires_grad for part in parts) else parts[0]
    gate, value = parts[wiring.gate], parts[1 - wiring.gate]
    # A patched layer may return another dtype, and the formula returns the wider one.
    alike = (gate.shape, gate.dtype, gate.device) == (value.shape, value.dtype, value.device)
    product = kernels.silu_mul_by_kernel(gate, value, out) if alike else None
    if product is None:
        product = F.silu(gate, inplace=out is gate)
        product = product.mul_(value) if alike and out is gate else product * value
    if wiring.saturates and product.dtype == torch.float16:
        product = torch.nan_to_num(product, nan=0.0, posinf=65504, neginf=-65504)
    return product
