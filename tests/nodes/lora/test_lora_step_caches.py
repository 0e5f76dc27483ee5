"""LoRAs on quantised models while caches and guidance skip layers, and layers of full precision.

ComfyUI reads the int8 weight of the second layer of Wan's feed forward without calling the layer.
A layer that is skipped in some calls is not such a layer.
"""

import dataclasses
import itertools

import pytest

from fast_video_vae.tests.nodes.lora import step_caches
from fast_video_vae.tests.nodes.lora.lora_errors import quantised_layers
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

KIND = "wan21-t2v"
INT8, FP8 = {"format": "int8_tensorwise"}, {"format": "float8_e4m3fn"}
ROTATED = INT8 | {"convrot": True, "convrot_groupsize": 64}
FORMS = {"int8": INT8, "rotated": ROTATED, "fp8": FP8}
READ = "ffn.2"  # the layers whose int8 weight is read without a call

SKIPS = {
    name: getattr(step_caches, name)
    for name in ("easy_cache", "residual_cache", "skip_layer", "lazy_cache", "nothing")
}


def in_blocks(key):
    return key.startswith("blocks.")


def read_only(key):
    return key.endswith(f"{READ}.weight")


@pytest.fixture
def fp8_products(comfyui, monkeypatch):
    """Let ComfyUI multiply in fp8, which it does not on a CPU."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "SUPPORT_FP8_OPS", True)


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


@each_value_once(skip=list(SKIPS)[:4], mode=("bypass", "auto"), form=("int8", "fp8"))
def test_skipped_layers_keep_their_quantised_products(skip, mode, form, fp8_products):
    """In this run and in later ones; no call is repeated."""
    cache, pair = SKIPS[skip], Pair(FORMS[form])
    model = pair.model
    without = pair.run(cache(model))
    alone = pair.run(fast(pair.loaded(), pair.lora, 0.8, mode))
    before = weights(model)
    latent, counted, called = pair.run(cache(fast(model, pair.lora, 0.8, mode)))
    expected_latent, _, expected_calls = pair.run(cache(core(pair.plain, pair.lora, 0.8)))
    assert called == expected_calls == without[2]
    assert called_layers(counted) == called_layers(without[1]) != {}
    # Twice the error of the quantised products without a LoRA, in the same calls.
    bound = 2 * relative_error(without[0], pair.run(cache(pair.plain))[0])
    assert relative_error(latent, expected_latent) < bound
    assert relative_error(latent, without[0]) > max(EFFECT, bound)
    assert weights(model) == before
    assert nothing_left(model)
    pair.same(cache(model), without)
    pair.same(fast(model, pair.lora, 0.8, mode), alone)


@pytest.mark.parametrize(
    ("skip", "mode"), [*zip(SKIPS, itertools.cycle(UNMERGED), strict=False), ("skip_layer", "auto")]
)
def test_skipped_layers_get_the_lora_in_the_other_calls(skip, mode):
    """Without quantised products: all is as with a model of plain weights."""
    cache = SKIPS[skip]
    pair = Pair(INT8, in_blocks if mode == "stream" else read_only)
    expected, _, expected_calls = pair.run(cache(core(pair.plain, pair.lora, 0.8)))
    without = pair.run(cache(pair.model))
    patched = fast(pair.model, pair.lora, 0.8, mode)
    for _ in range(2):
        latent, counted, called = pair.run(cache(patched))
        assert called == expected_calls
        assert counted == {}
        assert relative_error(latent, expected) < ROUNDING
    assert relative_error(expected, without[0]) > EFFECT
    pair.same(cache(pair.model), without)


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


@pytest.mark.parametrize(
    ("form", "mode", "skip"),
    [
        ("int8", "auto", "nothing"),
        ("int8", "bypass", "easy_cache"),
        ("rotated", "stream", "skip_layer"),
        ("rotated", "bypass", "nothing"),
        ("fp8", "bypass", "skip_layer"),
        ("fp8", "stream", "easy_cache"),
    ],
)
@pytest.mark.parametrize("only_read", [False, True], ids=["all", "read"])
def test_layers_of_full_precision_get_the_lora(form, mode, skip, only_read):
    """ComfyUI multiplies in int8 in spite of it if the weight needs no cast."""
    cache = SKIPS[skip]
    pair = Pair(
        FORMS[form] | {"full_precision_matrix_mult": True}, read_only if only_read else in_blocks
    )
    if only_read:
        state = {key: value for key, value in pair.state.items() if read_only(key)}
        pair.lora = save_lora(lora_for(state), "read.safetensors")
    layers = quantised_layers(pair.model).values()
    assert all(layer._full_precision_mm for layer in layers)
    without, before = pair.run(cache(pair.model)), weights(pair.model)
    expected, _, expected_calls = pair.run(cache(core(pair.plain, pair.lora, 0.8)))
    bound = ROUNDING
    if mode != "stream" and form != "fp8" and not only_read:
        bound = 2 * relative_error(without[0], pair.run(cache(pair.plain))[0])
    patched = fast(pair.model, pair.lora, 0.8, mode)
    for _ in range(2):
        latent, counted, called = pair.run(cache(patched))
        assert called == expected_calls
        # "auto" may change the weights of larger calls: these are in plain arithmetic by intent.
        assert mode != "bypass" or called_layers(counted) == called_layers(without[1])
        assert relative_error(latent, expected) < bound
    assert relative_error(latent, without[0]) > max(bound, EFFECT)
    assert weights(pair.model) == before
    pair.same(pair.model if skip == "nothing" else cache(pair.model), without)
