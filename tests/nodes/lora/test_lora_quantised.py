"""LoRAs on quantised models: of ComfyUI, of other packs' layers, and with layers that are skipped.

ComfyUI reads the int8 weight of the second layer of Wan's feed forward without calling the layer.
A layer that a cache or a guidance skips in some calls is not such a layer.
"""

import dataclasses
import logging

import pytest
import torch
from torch.nn import functional as F

from fast_video_vae.tests.nodes.lora import step_caches
from fast_video_vae.tests.nodes.lora.lora_errors import KIND, fp8, fp8_errors, quantised_layers
from fast_video_vae.tests.nodes.lora.lora_models import (
    EFFECT,
    KINDS,
    ROUNDING,
    UNMERGED,
    core,
    fast,
    load_model,
    lora_for,
    nothing_left,
    random_weights,
    relative_error,
    sample,
    save_lora,
    weights,
)
from fast_video_vae.tests.nodes.lora.step_caches import STEPS, calls, products, quantised
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


def int8(state, **more):
    """A file whose second layers of feed forwards are int8, with a scale for each output."""
    form = {"format": "int8_tensorwise", **more}
    return quantised(state, form, lambda key: key.endswith("ffn.2.weight"))


def rotated_int8(state):
    """Quantise rotated rows."""
    return int8(state, convrot=True, convrot_groupsize=64)


def dequantised(model, state):
    """The model as if its file had had the values of the quantised weights in float32."""
    values = {
        f"{name}.weight".removeprefix("diffusion_model."): module.weight.dequantize().clone()
        for name, module in quantised_layers(model).items()
    }
    return load_model(KIND, state | values)


@each_value_once(quantise=[fp8, int8, rotated_int8], mode=UNMERGED)
def test_a_run_equals_that_of_the_dequantised_model(quantise, mode):
    """In every mode from the first call on; ComfyUI's loader quantises the sum once more."""
    state = random_weights(KIND)
    model = load_model(KIND, quantise(state))
    assert len(quantised_layers(model)) == (20 if quantise is fp8 else 2)
    lora = save_lora(lora_for(state, parts=("pairs", "biases", "norms")))
    expected = sample(core(dequantised(model, state), lora, 0.8))
    without, before = sample(model), weights(model)
    patched = fast(model, lora, 0.8, mode)
    first = sample(patched)
    assert relative_error(first, expected) < ROUNDING
    assert relative_error(first, without) > EFFECT
    assert torch.equal(sample(patched), first)
    assert weights(model) == before
    assert nothing_left(model)
    assert torch.equal(sample(model), without)
    assert relative_error(sample(core(model, lora, 0.8)), expected) > 100 * ROUNDING


def test_a_quantised_model_is_not_merged():
    state = random_weights(KIND)
    model, lora = load_model(KIND, fp8(state)), save_lora(lora_for(state))
    with pytest.raises(ValueError, match=r"^stack: \S+ is QuantizedTensor; merged needs"):
        fast(model, lora, 0.8, "merged")


# Bounds of the relative error of a LoRA's effect, for deltas of 1 % of the weights.
# stream: the sum is rounded to bf16, by 2^-8 / sqrt(3) / m = 0.23 % / m of itself on average for a
# mantissa m from 1 to 2: 16 % of the delta for weights of all mantissas.
STREAM, BYPASS = 0.20, 0.01
REQUANTISED = 0.8


def test_small_deltas_survive_on_fp8_weights():
    """The error of what a LoRA adds, layer by layer in bf16, without that of the output's bf16."""
    errors = fp8_errors()
    assert {len(values) for values in errors.values()} == {20}
    assert max(errors["stream"]) <= STREAM
    assert max(errors["bypass"]) <= BYPASS
    assert min(errors["core"]) >= REQUANTISED


class Packed(torch.Tensor):
    """Packed bytes of a weight, as in GGUF, with the shape of the weight as an attribute."""

    @staticmethod
    def of(weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round().to(torch.int8)
        data = torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], 1)
        return data.as_subclass(Packed)

    @property
    def tensor_shape(self):
        return torch.Size((self.shape[0], self.shape[1] - 4))

    def unpacked(self):
        data = self.detach().as_subclass(torch.Tensor)
        scale = data[:, -4:].contiguous().view(torch.float32)
        return data[:, :-4].contiguous().view(torch.int8) * scale


class PackedLinear(torch.nn.Module):
    """A layer that unpacks its own weight and ignores weight functions."""

    comfy_cast_weights = True

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(Packed.of(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.weight_function, self.bias_function = [], []

    def forward(self, x):
        return F.linear(x, Packed.unpacked(self.weight), self.bias)


class UnpackingLinear(PackedLinear):
    """A layer that unpacks by a method of this name and arguments, as those of ComfyUI-GGUF do."""

    def get_weight(self, packed, dtype):
        return (packed if packed.ndim < 2 else Packed.unpacked(packed)).to(dtype)

    def forward(self, x):
        weight, bias = self.weight.to(x.device), self.bias.to(x.device)
        return F.linear(x, self.get_weight(weight, x.dtype), self.get_weight(bias, x.dtype))


def packed(state, linear=PackedLinear):
    """Return a model with such layers in its blocks, and one with the unpacked weights."""
    model, values = load_model(KIND, state), dict(state)
    for name, module in list(model.model.named_modules()):
        if ".blocks." in name and type(module).__name__ == "Linear":
            parent, _, leaf = name.rpartition(".")
            layer = linear(module)
            setattr(model.model.get_submodule(parent), leaf, layer)
            values[f"{name}.weight".removeprefix("diffusion_model.")] = Packed.unpacked(
                layer.weight
            )
    return model, load_model(KIND, values)


def loha_for(state):
    """Return a LoHa of the linear layers of the blocks."""
    generator, file = torch.Generator().manual_seed(7), {}
    for key, value in state.items():
        if key.startswith("blocks.") and key.endswith(".weight") and value.ndim == 2:
            out, inner = value.shape
            name = f"diffusion_model.{key.removesuffix('.weight')}"
            shapes = {"w1_a": (out, 3), "w1_b": (3, inner), "w2_a": (out, 3), "w2_b": (3, inner)}
            for part, shape in shapes.items():
                size = 0.4 if part.endswith("a") else inner**-0.25
                file[f"{name}.hada_{part}"] = size * torch.randn(shape, generator=generator)
    return file


@pytest.mark.parametrize(
    ("form", "mode"),
    [("pairs", "auto"), ("pairs", "bypass"), ("loha", "stream"), ("loha", "bypass"),
     ("dora", "auto"), ("dora", "stream")],
)  # fmt: skip
def test_layers_that_unpack_their_own_weights_get_the_lora(form, mode, caplog):
    """DoRA only where a method gives the weight."""
    state = random_weights(KIND)
    model, plain = packed(state, UnpackingLinear if form == "dora" else PackedLinear)
    make = {"pairs": lora_for, "loha": loha_for, "dora": dora_for}[form]
    lora = save_lora(make(state), f"{form}.safetensors")
    without, before = sample(model), weights(model)
    expected = sample(core(plain, lora, 0.8))
    patched = fast(model, lora, 0.8, mode)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert relative_error(sample(patched), expected) < ROUNDING
    assert not [each for each in caplog.messages if "no effect" in each]
    assert relative_error(expected, without) > EFFECT
    assert weights(model) == before
    assert not any("get_weight" in module.__dict__ for module in model.model.modules())
    assert torch.equal(sample(model), without)


def dora_for(state):
    """Return a LoRA with DoRA's magnitudes for the blocks, about those of the weights."""
    file = lora_for(state, parts=("pairs", "biases"))
    file = {key: value for key, value in file.items() if ".blocks." in key}
    for key in [key for key in file if key.endswith("lora_up.weight")]:
        weight = state[key.removeprefix("diffusion_model.").replace("lora_up.", "")]
        file[key.replace("lora_up.weight", "dora_scale")] = weight.norm(dim=1, keepdim=True)
    return file


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_patch_of_an_unreadable_weight_is_logged_once(mode, caplog):
    """DoRA scales the sum of weight and delta: without the weight it has no effect at all."""
    state = random_weights(KIND)
    model, _ = packed(state)
    file = dora_for({key: value for key, value in state.items() if "q.weight" in key})
    patched = fast(model, save_lora(file, "dora.safetensors"), 0.8, mode)
    without = sample(model)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(sample(patched), without)
        sample(patched)
    said = [each for each in caplog.messages if "no effect" in each]
    assert len(said) == 1
    assert "no effect on 4 layers" in said[0]
    assert "blocks.0.cross_attn.q" in said[0]


INT8 = {"format": "int8_tensorwise"}
FORMS = {
    "int8": INT8,
    "rotated": INT8 | {"convrot": True, "convrot_groupsize": 64},
    "fp8": {"format": "float8_e4m3fn"},
}
READ = "ffn.2"  # the layers whose int8 weight is read without a call


def in_blocks(key):
    return key.startswith("blocks.")


def read_only(key):
    return key.endswith(f"{READ}.weight")


class Pair:
    """A quantised model, the same one with plain weights, and a LoRA for them."""

    def __init__(self, form, wanted=in_blocks, kind=KIND):
        self.kind, self.state = kind, random_weights(kind)
        self.form, self.wanted = form, wanted
        self.model = self.loaded()
        values = {
            f"{name}.weight".removeprefix("diffusion_model."): module.weight.dequantize().clone()
            for name, module in quantised_layers(self.model).items()
        }
        assert values.keys() == {key for key in values if wanted(key)} != set()
        self.plain = load_model(kind, self.state | values)
        self.lora = save_lora(lora_for(self.state), f"skips-{kind}.safetensors")

    def loaded(self):
        """The quantised model, loaded once more."""
        return load_model(self.kind, quantised(self.state, self.form, self.wanted))

    def run(self, model, **options):
        """A run: the latent, products with each weight, and blocks in each call."""
        with products(model) as counted, calls(model) as called:
            latent = sample(model, self.kind, steps=STEPS, **options)
        return latent, dict(counted), called

    def same(self, model, expected):
        """Check that a run gives exactly what one gave before."""
        found = self.run(model)
        assert found[0].equal(expected[0])
        assert found[1:] == expected[1:]


def called_layers(counted):
    """Counts of the layers that are called, so that a LoRA need not change their weights."""
    return {name: number for name, number in counted.items() if not name.endswith(READ)}


@pytest.mark.parametrize("mode", ["auto", "bypass"])
def test_layers_without_a_call_or_a_lora_keep_what_they_are(mode, monkeypatch):
    """Layers of image-to-video models are for an image's embedding, which is optional."""
    kind = "wan21-i2v"
    known = KINDS[kind]
    more = {key: value for key, value in known.more.items() if key != "clip_vision_output"}
    monkeypatch.setitem(KINDS, kind, dataclasses.replace(known, more=more))
    pair = Pair(INT8, lambda key: in_blocks(key) or key.startswith("img_emb."), kind)
    assert any("img_emb" in name for name in quantised_layers(pair.model))
    without = pair.run(pair.model)
    bound = 2 * relative_error(without[0], pair.run(pair.plain)[0])
    latent, counted, called = pair.run(fast(pair.model, pair.lora, 0.8, mode))
    assert called == without[2]
    assert called_layers(counted) == called_layers(without[1]) != {}
    assert relative_error(latent, pair.run(core(pair.plain, pair.lora, 0.8))[0]) < bound
    # A LoRA of the attention leaves the int8 weights of the feed forward, which are only read.
    attention = {key: value for key, value in pair.state.items() if "attn" in key}
    latent, counted, called = pair.run(
        fast(pair.model, save_lora(lora_for(attention), "attention.safetensors"), 0.8, mode)
    )
    assert (counted, called) == without[1:]
    assert relative_error(latent, without[0]) > EFFECT
    pair.same(pair.model, without)


# Form, the layers, mode, and what skips layers. ComfyUI multiplies in int8 in spite of a full
# precision that is asked for if the weight needs no cast.
ROWS = [
    ("int8", in_blocks, "bypass", "easy_cache"),
    ("fp8", in_blocks, "auto", "easy_cache"),
    ("int8", in_blocks, "auto", "lazy_cache"),
    ("fp8", in_blocks, "bypass", "skip_layer"),
    ("int8", in_blocks, "stream", "lazy_cache"),
    ("int8", read_only, "auto", "easy_cache"),
    ("int8", read_only, "bypass", "skip_layer"),
    ("full int8", in_blocks, "bypass", "easy_cache"),
    ("full int8", read_only, "auto", "nothing"),
    ("full rotated", in_blocks, "stream", "skip_layer"),
    ("full rotated", in_blocks, "auto", "nothing"),
    ("full fp8", in_blocks, "bypass", "skip_layer"),
    ("full fp8", read_only, "stream", "easy_cache"),
]


@pytest.mark.parametrize(("form", "layers", "mode", "skip"), ROWS)
def test_quantised_layers_that_are_skipped_get_the_lora(form, layers, mode, skip, monkeypatch):
    """In this run and in later ones as core's loader on plain weights; no call is repeated."""
    import comfy.model_management

    full, form = "full" in form, form.removeprefix("full ")
    if form == "fp8" and not full:  # ComfyUI does not multiply in fp8 on a CPU
        monkeypatch.setattr(comfy.model_management, "SUPPORT_FP8_OPS", True)
    cache = getattr(step_caches, skip)
    pair = Pair(FORMS[form] | ({"full_precision_matrix_mult": True} if full else {}), layers)
    model, lora = pair.model, pair.lora
    if layers is read_only:  # a LoRA of these alone must have its whole effect
        own = {key: value for key, value in pair.state.items() if read_only(key)}
        lora = save_lora(lora_for(own), "read.safetensors")
    without, before = pair.run(cache(model)), weights(model)
    alone = pair.run(fast(pair.loaded(), lora, 0.8, mode))
    expected, _, expected_calls = pair.run(cache(core(pair.plain, lora, 0.8)))
    # Products stay quantised: twice their error without a LoRA, in the same calls.
    kept = layers is in_blocks and mode != "stream" and not (full and form == "fp8")
    plain = relative_error(without[0], pair.run(cache(pair.plain))[0])
    bound = 2 * plain if kept else ROUNDING
    for _ in range(2):
        latent, counted, called = pair.run(cache(fast(model, lora, 0.8, mode)))
        assert called == expected_calls == without[2]
        assert relative_error(latent, expected) < bound
        # "auto" may change the weights of larger calls: these are in plain arithmetic by intent.
        if kept and not (full and mode == "auto"):
            assert called_layers(counted) == called_layers(without[1]) != {}
    assert relative_error(latent, without[0]) > max(EFFECT, bound)
    assert weights(model) == before
    assert nothing_left(model)
    pair.same(cache(model), without)
    pair.same(fast(model, lora, 0.8, mode), alone)
