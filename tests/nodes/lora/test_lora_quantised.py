"""LoRAs on quantised models: of ComfyUI, of other packs' layers, and with layers that are skipped.

ComfyUI reads the int8 weight of the second layer of Wan's feed forward without calling the layer.
A layer that a cache or a guidance skips in some calls is not such a layer.
"""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import ROUNDING, core, fast, relative_error
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

READ = "ffn.2"  # the layers whose int8 weight is read without a call


class Packed(torch.Tensor):
    """The bytes of weights in float16, with their shape as an attribute, as GGUF's."""

    @property
    def tensor_shape(self):
        return torch.Size((self.shape[0], self.shape[1] // 2))

    def unpacked(self):
        return self.detach().as_subclass(torch.Tensor).view(torch.float16).float()


class PackedLinear(nn.Module):
    """A layer that unpacks its own weight and ignores weight functions."""

    comfy_cast_weights = True
    weight_function, bias_function = [], []

    def forward(self, x):
        return F.linear(x, Packed.unpacked(self.weight), self.bias)


class UnpackingLinear(PackedLinear):
    """A layer that unpacks by a method of this name and arguments, as those of ComfyUI-GGUF do."""

    def get_weight(self, packed, dtype):
        return (packed if packed.ndim < 2 else Packed.unpacked(packed)).to(dtype)

    def forward(self, x):
        return F.linear(
            x, self.get_weight(self.weight, x.dtype), self.get_weight(self.bias, x.dtype)
        )


INT8 = {"format": "int8_tensorwise"}
FORMS = {
    "int8": INT8,
    "rotated": INT8 | {"convrot": True, "convrot_groupsize": 64},
    "fp8": diffusion.FP8,
    "packed": PackedLinear,
    "unpacking": UnpackingLinear,
}


def quantised(form, kind, full, wanted):
    """A model whose blocks have quantised layers, and one with their values in float32."""
    state, named = diffusion.random_weights(kind), f"{wanted}.weight" if wanted == READ else ""
    if isinstance(form, dict):
        form = form | ({"full_precision_matrix_mult": True} if full else {})
        file = diffusion.quantised(state, form, lambda key: key[:7] == "blocks." and named in key)
        return diffusion.load_model(kind, file), diffusion.dequantised(file, kind)
    model = diffusion.load_model(kind, state)
    for name, layer in model.model.named_modules():
        if ".blocks." in name and type(layer).__name__ == "Linear":
            data = layer.weight.detach().half().view(torch.uint8).as_subclass(Packed)
            layer.weight, layer.__class__ = nn.Parameter(data, requires_grad=False), form
            state[f"{name}.weight".removeprefix("diffusion_model.")] = Packed.unpacked(data)
    return model, diffusion.load_model(kind, state)


def run(model, skip, kind):
    """A run in which a cache skips two of five steps, or a guidance a block in further calls."""
    if skip == "EasyCacheNode":
        given = {"reuse_threshold": 1000.0, "start_percent": 0.0, "end_percent": 0.7}
        (model,) = v3_node("nodes_easycache", skip, model=model, verbose=False, **given)
    elif skip is not None:
        given = {"double_layers": "1", "single_layers": "", "scale": 1.0}
        given |= {"start_percent": 0.0, "end_percent": 1.0}
        (model,) = v3_node("nodes_slg", skip, model=model, **given)
    return sample(model, kind, steps=5)


# In a full precision that is asked for, or on a CPU, ComfyUI dequantises fp8 for each product. It
# multiplies in int8 in spite of full precision if the weight needs no cast.
DEQUANTISED = ("fp8 on a CPU", "packed", "unpacking")
# Form; the layers with a LoRA: all, those of the attention in a model that calls some of them with
# enough tokens of an image for auto to change plain weights, or those that are read only, which
# are then the only quantised ones; mode; and what skips layers.
ROWS = [
    ("int8", "attn", "auto", None),
    ("rotated", READ, "bypass", "SkipLayerGuidanceDiT"),
    ("fp8", "", "auto", "EasyCacheNode"),
    ("fp8 on a CPU", "", "stream", None),
    ("full int8", "", "bypass", None),
    ("packed", "blocks", "auto", None),
    ("packed", "dora", "bypass", None),
    ("unpacking", "blocks", "stream", "EasyCacheNode"),
    ("unpacking", "dora", "auto", None),
]


@pytest.mark.parametrize(("name", "layers", "mode", "skip"), ROWS)
def test_a_quantised_model_gets_the_lora_as_its_plain_one(
    name, layers, mode, skip, monkeypatch, caplog
):
    """In this run and in later ones as core's loader on plain weights; its weights are unchanged.

    DoRA scales the sum of weight and delta: without the weight it has no effect at all.
    """
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "SUPPORT_FP8_OPS", name == "fp8")
    form, full = FORMS[name.removeprefix("full ").removesuffix(" on a CPU")], "full" in name
    kind = "wan21-i2v" if layers == "attn" else KIND
    model, plain = quantised(form, kind, full, layers)
    state, part = diffusion.random_weights(kind), "blocks" if layers == "dora" else layers
    file = loras.lora_for({key: value for key, value in state.items() if part in key})
    for key in [key for key in file if layers == "dora" and key.endswith("lora_up.weight")]:
        weight = state[key.removeprefix("diffusion_model.").replace("lora_up.", "")]
        file[key.replace("lora_up.weight", "dora_scale")] = weight.norm(dim=1)[:, None]
    lora = loras.save_lora(file, "all.safetensors")
    without, before = run(model, skip, kind), loras.weights(model)
    expected = run(core(plain, lora, 0.8), skip, kind)
    # Products stay quantised: twice their error without a LoRA.
    kept = layers != READ and mode != "stream" and name not in DEQUANTISED
    bound = 2 * relative_error(without, run(plain, skip, kind)) if kept else ROUNDING
    assert relative_error(expected, without) > max(loras.EFFECT, bound)
    patched = fast(model, lora, 0.8, mode)
    with caplog.at_level(logging.WARNING):
        errors = [relative_error(run(patched, skip, kind), expected) for _ in range(2)]
    said = [each for each in caplog.messages if "no effect" in each]
    if (name, layers) == ("packed", "dora"):
        assert ["no effect on 20 layers" in each for each in said] == [True]
    else:
        assert not said
        assert max(errors) < bound
    # "auto" may change the weights of larger calls: these are in plain arithmetic by intent.
    if kept and not (full and mode == "auto"):
        called = {key: value for key, value in file.items() if READ not in key}
        none = fast(model, loras.save_lora(called, "called.safetensors"), 1e-30, mode)
        assert run(none, skip, kind).equal(without)
    assert loras.weights(model) == before
    assert not any("get_weight" in module.__dict__ for module in model.model.modules())
    assert run(model, skip, kind).equal(without)
