"""LoRAs on quantised models: of ComfyUI, of other packs' layers, and with layers that are skipped.

ComfyUI reads the int8 weight of the second layer of Wan's feed forward without calling the layer.
A layer that a cache or a guidance skips in some calls is not such a layer.
"""

import contextlib
import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import ROUNDING, core, fast
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

READ = "ffn.2"  # the layers whose int8 weight is read without a call


@contextlib.contextmanager
def products(model):
    """Yield the number of quantised products with each weight, in the block.

    ComfyUI multiplies with a quantised tensor, or calls comfy-kitchen with its int8 values. An fp8
    weight is dequantised for such a product unless the input is fp8, too.
    """
    import comfy_kitchen.tensor

    count = Counter()
    owners = {
        module.weight._qdata.untyped_storage().data_ptr(): name
        for name, module in diffusion.quantised_layers(model).items()
    }

    def add(tensors):
        data = [getattr(each, "_qdata", each) for each in tensors if isinstance(each, torch.Tensor)]
        data = [each for each in data if each.dtype in (torch.int8, torch.float8_e4m3fn)]
        if len(data) == 2 or any(each.dtype == torch.int8 for each in data):
            names = {owners.get(each.untyped_storage().data_ptr()) for each in data}
            count.update(names - {None})

    kind, int8_linear = comfy_kitchen.tensor.QuantizedTensor, comfy_kitchen.int8_linear
    dispatch = kind.__torch_dispatch__

    def operation(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("linear", "mm", "addmm"):
            add(args)
        return dispatch(function, types, args, kwargs)

    def linear(*args, **kwargs):
        add(args)
        return int8_linear(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__torch_dispatch__", classmethod(operation))
        patch.setattr(comfy_kitchen, "int8_linear", linear)
        yield count


# Caches skip the third and fourth of five steps, EasyCache within the network's forward. Which ones
# they skip at the default threshold of 0.2 depends on the LoRA. The guidance calls the network once
# more in each step, without its last block.
STEPS = {"reuse_threshold": 1000.0, "start_percent": 0.0, "end_percent": 0.7, "verbose": False}
LAYERS = {"scale": 1.0, "start_percent": 0.0, "end_percent": 1.0}
LAYERS |= {"double_layers": "1", "single_layers": ""}
SKIPS = {
    "EasyCache": ("nodes_easycache", "EasyCacheNode", STEPS),
    "LazyCache": ("nodes_easycache", "LazyCacheNode", STEPS),
    "skip layer": ("nodes_slg", "SkipLayerGuidanceDiT", LAYERS),
}


def run(model, skip=None, kind=KIND):
    """A run: the latent, counts of products, of called layers only, and the blocks in each call."""
    if skip is not None:
        file, node, given = SKIPS[skip]
        (model,) = v3_node(file, node, model=model, **given)
    network, blocks = model.model.diffusion_model, []
    handles = [network.register_forward_pre_hook(lambda *_: blocks.append([]))]
    for number, block in enumerate(network.blocks):
        note = lambda *_, number=number: blocks[-1].append(number)  # noqa: E731
        handles.append(block.register_forward_pre_hook(note))
    with products(model) as count:
        latent = sample(model, kind, steps=5)
    for handle in handles:
        handle.remove()
    called = {name: number for name, number in count.items() if not name.endswith(READ)}
    return latent, dict(count), called, blocks


INT8 = {"format": "int8_tensorwise"}
FORMS = {
    "int8": INT8,
    "rotated": INT8 | {"convrot": True, "convrot_groupsize": 64},
    "fp8": diffusion.FP8,
}
# In a full precision that is asked for, or on a CPU, ComfyUI dequantises fp8 for each product. It
# multiplies in int8 in spite of full precision if the weight needs no cast.
DEQUANTISED = ("full fp8", "fp8 on a CPU")
# Form; the layers with a LoRA: all, those of the attention in a model that calls some of them with
# enough tokens of an image for auto to change plain weights, or those that are read only, which
# are then the only quantised ones; mode; and what skips layers.
ROWS = [
    ("int8", "all", "bypass", "EasyCache"),
    ("int8", "all", "auto", "LazyCache"),
    ("int8", "all", "stream", "skip layer"),
    ("int8", "attention", "auto", None),
    ("int8", "read", "auto", "EasyCache"),
    ("int8", "read", "stream", None),
    ("rotated", "read", "bypass", "skip layer"),
    ("fp8", "all", "auto", "EasyCache"),
    ("fp8", "all", "bypass", "skip layer"),
    ("fp8 on a CPU", "all", "auto", None),
    ("fp8 on a CPU", "all", "stream", "LazyCache"),
    ("full int8", "all", "bypass", "EasyCache"),
    ("full int8", "read", "auto", None),
    ("full rotated", "all", "auto", None),
    ("full rotated", "all", "stream", "skip layer"),
    ("full fp8", "all", "bypass", "LazyCache"),
]


@pytest.mark.parametrize(("name", "layers", "mode", "skip"), ROWS)
def test_a_quantised_model_gets_the_lora_as_its_plain_one(name, layers, mode, skip, monkeypatch):
    """In this run and in later ones as core's loader on plain weights; no call is repeated."""
    import comfy.model_management

    full, form = "full" in name, FORMS[name.removeprefix("full ").removesuffix(" on a CPU")]
    monkeypatch.setattr(comfy.model_management, "SUPPORT_FP8_OPS", name == "fp8")
    kind = "wan21-i2v" if layers == "attention" else KIND
    state = diffusion.random_weights(kind)
    part = {"all": "", "attention": "attn", "read": f"{READ}.weight"}[layers]
    lora = {key: value for key, value in state.items() if part in key}
    lora = loras.save_lora(loras.lora_for(lora), f"{layers}.safetensors")
    wanted = part if layers == "read" else ""
    form = form | ({"full_precision_matrix_mult": True} if full else {})
    file = diffusion.quantised(state, form, lambda key: key.startswith("blocks.") and wanted in key)
    model, plain = diffusion.load_model(kind, file), diffusion.dequantised(file, kind)
    without, before = run(model, skip, kind), loras.weights(model)
    alone = run(fast(diffusion.load_model(kind, file), lora, 0.8, mode), None, kind)
    expected = run(core(plain, lora, 0.8), skip, kind)
    # Products stay quantised: twice their error without a LoRA, in the same calls.
    kept = layers != "read" and mode != "stream" and name not in DEQUANTISED
    error = loras.relative_error(without[0], run(plain, skip, kind)[0])
    bound = 2 * error if kept else ROUNDING
    for _ in range(2):
        latent, count, called, blocks = run(fast(model, lora, 0.8, mode), skip, kind)
        assert blocks == expected[3] == without[3]
        assert loras.relative_error(latent, expected[0]) < bound
        # "auto" may change the weights of larger calls: these are in plain arithmetic by intent.
        if kept and not (full and mode == "auto"):
            assert called == without[2] != {}
        # Weights without a LoRA stay quantised, also those that are read only.
        assert layers != "attention" or count == without[1]
    assert loras.relative_error(latent, without[0]) > max(loras.EFFECT, bound)
    assert loras.weights(model) == before
    for again, skips, first in (
        (model, skip, without),
        (fast(model, lora, 0.8, mode), None, alone),
    ):
        latent, *counts = run(again, skips, kind)
        assert latent.equal(first[0])
        assert counts == list(first[1:])


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
        weight, bias = self.weight.to(x.device), self.bias.to(x.device)
        return F.linear(x, self.get_weight(weight, x.dtype), self.get_weight(bias, x.dtype))


def packed(state, linear):
    """Return a model with such layers in its blocks, and one with the unpacked weights."""
    model, values = diffusion.load_model(KIND, state), dict(state)
    for name, layer in model.model.named_modules():
        if ".blocks." in name and type(layer).__name__ == "Linear":
            data = layer.weight.detach().half().view(torch.uint8).as_subclass(Packed)
            layer.weight, layer.__class__ = nn.Parameter(data, requires_grad=False), linear
            key = f"{name}.weight".removeprefix("diffusion_model.")
            values[key] = Packed.unpacked(layer.weight)
    return model, diffusion.load_model(KIND, values)


def lora_of(form, state):
    """A LoRA of the blocks: pairs, or pairs with DoRA's magnitudes."""
    pairs = loras.lora_for(state, parts=("pairs", "biases"))
    pairs = {key: value for key, value in pairs.items() if ".blocks." in key}
    for key in [key for key in pairs if form == "dora" and key.endswith("lora_up.weight")]:
        weight = state[key.removeprefix("diffusion_model.").replace("lora_up.", "")]
        pairs[key.replace("lora_up.weight", "dora_scale")] = weight.norm(dim=1)[:, None]
    return pairs


@pytest.mark.parametrize(
    ("linear", "form", "mode"),
    [
        (PackedLinear, "pairs", "auto"),
        (PackedLinear, "pairs", "bypass"),
        (UnpackingLinear, "pairs", "stream"),
        (UnpackingLinear, "dora", "auto"),
        (PackedLinear, "dora", "bypass"),
    ],
)
def test_layers_that_unpack_their_own_weights_get_the_lora(linear, form, mode, caplog):
    """DoRA scales the sum of weight and delta: without the weight it has no effect at all."""
    state = diffusion.random_weights(KIND)
    model, plain = packed(state, linear)
    lora = loras.save_lora(lora_of(form, state), f"{form}.safetensors")
    without, before = sample(model), loras.weights(model)
    expected, patched = sample(core(plain, lora, 0.8)), fast(model, lora, 0.8, mode)
    with caplog.at_level(logging.WARNING):
        errors = [loras.relative_error(sample(patched), expected) for _ in range(2)]
    said = [each for each in caplog.messages if "no effect" in each]
    if linear is PackedLinear and form == "dora":
        (line,) = said
        assert "no effect on 20 layers" in line
        assert "blocks.0.cross_attn.k" in line
    else:
        assert not said
        assert max(errors) < ROUNDING
    assert loras.relative_error(expected, without) > loras.EFFECT
    assert loras.weights(model) == before
    assert not any("get_weight" in module.__dict__ for module in model.model.modules())
    assert torch.equal(sample(model), without)
