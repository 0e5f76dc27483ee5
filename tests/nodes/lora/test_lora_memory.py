"""Apply LoRA (Fast) in ComfyUI's memory management: with DynamicVRAM nothing is unloaded for it.

Runs of two experts with a LoRA each are compared with the same runs without, on a card of 24 GB
that is counted instead of used (`cards`), and on a GPU where there is one.
"""

import functools

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.lora.cards import GB, KIND, Cards, a_prompt
from fast_video_vae.tests.nodes.lora.lora_models import (
    EFFECT,
    ROUNDING,
    UNMERGED,
    bits,
    core,
    fast,
    load_model,
    lora,
    random_weights,
    relative_error,
    sample,
    stack,
)
from fast_video_vae.tests.nodes.sampling.sampler_models import experts, in_two, samples
from fast_video_vae.tests.products import each_value_once

pytestmark = pytest.mark.comfyui

OPTIONS = {"dtype": torch.float32}


@pytest.fixture(scope="module")
def expected(comfyui):
    """What ComfyUI's loader gives without DynamicVRAM, and the files and models of all tests.

    They are made first: with DynamicVRAM a new network has no weights.
    """
    for number in (0, 1):
        state(number), lora(number)
    experts()  # the defaults of `samples`
    with torch.inference_mode():
        yield sample(core(load_model(KIND, state(0)), lora(0), 0.8))
    state.cache_clear()


@pytest.fixture
def cards(expected, inference, monkeypatch):
    return Cards(monkeypatch)


@functools.cache
def state(number):
    return random_weights(KIND, number)


def load(number=0, **options):
    """A MODEL that ComfyUI can load again without DynamicVRAM."""
    import comfy.sd

    model = comfy.sd.load_diffusion_model_state_dict(dict(state(number)), OPTIONS, **options)
    model.cached_patcher_init = load, (number,)
    return model


def loaded(patcher):
    """The entries of a model in ComfyUI's list."""
    import comfy.model_management

    current = comfy.model_management.current_loaded_models
    return [each for each in current if each.model is patcher]


def in_core(high, low, strength):
    """Both experts by ComfyUI's KSampler, with a LoRA each if there is a strength."""
    if strength is not None:
        high, low = (fast(model, lora(seed), strength) for seed, model in enumerate((high, low)))
    with a_prompt(high, low):
        return in_two(high, low, at=1, steps=2)


def in_ours(high, low, strength):
    """Both experts by Wan Sampler (Fast)."""
    loras = {}
    if strength is not None:
        names = ("loras_high", "loras_low")
        loras = {name: stack(lora(seed), strength) for seed, name in enumerate(names)}
    with a_prompt(high, low):
        return samples(model_high=high, model_low=low, steps=2, **loras)


def run(cards, way, sizes, strengths):
    """Run a prompt for each of the strengths, after the encoding of its text; the last latent."""
    import comfy.model_management

    text, *both = sizes
    encoder = cards.text_encoder(text * GB)
    models = [
        cards.name(load(number), name, both[number] * GB)
        for number, name in enumerate(("high", "low"))
    ]
    for strength in strengths:
        with a_prompt(encoder):
            comfy.model_management.load_models_gpu([encoder], memory_required=GB)
            cards.call(encoder.model)
        latent = way(*models, strength)
    return latent


LOADS = [("loaded", "text encoder"), ("loaded", "high"), ("loaded", "low")]


@each_value_once(
    way=[in_core, in_ours],
    sizes=[
        (6, 14, 14),  # each expert fits, both together do not; fp8
        (11, 28, 28),  # neither the text encoder and an expert fit, nor an expert; bf16
    ],
)
def test_loras_unload_nothing_of_dynamic_models(expected, inference, monkeypatch, way, sizes):
    found = []
    for strengths in ([None] * 3, [0.8, 0.8, 0.5]):
        with monkeypatch.context() as patch:
            cards = Cards(patch)
            found.append(run(cards, way, sizes, strengths))
            assert cards.events == LOADS * 3
    assert relative_error(*found) > EFFECT


def _make_room(management, device):
    """A decode needs almost the whole card."""
    import comfy.model_patcher

    decoder = comfy.model_patcher.ModelPatcher(nn.Linear(2, 2), device, torch.device("cpu"))
    management.load_models_gpu([decoder], memory_required=22 * GB)
    assert management.get_free_memory(device) > 22 * GB


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "free",
    [
        lambda management, device: management.free_memory(1e30, device),
        lambda management, device: management.unload_all_models(),
        _make_room,
    ],
    ids=["free memory", "unload all", "make room"],
)
def test_comfyui_loads_and_unloads_the_bank(expected, inference, monkeypatch, dynamic, free):
    import comfy.model_management as management

    cards = Cards(monkeypatch, dynamic=dynamic)
    (device,) = cards.devices
    model = fast(cards.name(load(), "model", 14 * GB), lora(0), 0.8)
    (bank,) = model.get_additional_models()
    size = bank.model_size()
    assert size > 2**17
    assert bank.loaded_size() == 0
    for _ in range(2):
        assert relative_error(sample(model), expected) < ROUNDING
        management.load_models_gpu([model, *model.get_nested_additional_models()])
        cards.call(model.model)
        (entry,) = loaded(bank)
        assert entry.device == bank.current_loaded_device() == device
        assert entry.model_loaded_memory() == entry.model_memory() == size
        assert cards.free(device) <= 10 * GB - size
        free(management, device)
        management.free_memory(1e30, device)
        assert not loaded(bank)
        assert bank.loaded_size() == 0
        assert cards.free(device) == 24 * GB


def test_comfyui_frees_pinned_memory_with_a_bank_in_its_list(cards, expected):
    import comfy.model_management as management

    model = fast(load(), lora(0), 0.8)
    with a_prompt(model):
        sample(model)
        assert len(management.current_loaded_models) == 2
        subsets = management.PIN_SUBSETS + management.LOADED_PIN_SUBSETS
        for registrations in (False, True):
            management.free_model_pins(1e30, subsets, None, None, registrations=registrations)
        management.free_pins(1e30, evict_active=True)
        management.cleanup_models_gc()
        assert relative_error(sample(model), expected) < ROUNDING


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_lora_on_a_dynamic_model_equals_comfyuis_loader(cards, expected, mode):
    """On a static copy of it too: TorchCompileModel makes one, and hooks in conditionings do."""
    import comfy.model_management as management

    model = load()
    assert model.is_dynamic()
    before, without = bits(model), sample(model)
    patched = fast(model, lora(0), 0.8, mode)
    assert patched.patches_uuid == model.patches_uuid
    copy = patched.clone(disable_dynamic=True)
    assert not copy.is_dynamic()
    for each in (patched, copy, patched):
        assert relative_error(sample(each), expected) < ROUNDING
    assert torch.equal(sample(model), without)
    management.unload_all_models()
    assert bits(model) == before
