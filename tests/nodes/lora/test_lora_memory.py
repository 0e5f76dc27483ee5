"""Apply LoRA (Fast) in ComfyUI's memory management, on stand-in cards that are counted (`cards`).

With DynamicVRAM nothing is unloaded for a LoRA: runs of two experts with a LoRA each are compared
with the same runs without. With MultiGPU CFG Split each card has a part of a step and a bank.
"""

import functools
import gc
import threading
import weakref

import pytest
import torch

from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.cards import GB, Cards, a_prompt
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import core, fast, lora, stack
from fast_video_vae.tests.nodes.sampling.sampler_models import experts, samples
from fast_video_vae.tests.nodes.vae.pairs import relative_error, v3_node

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def expected(comfyui):
    """What ComfyUI's loader gives without DynamicVRAM, and the files and models of all tests.

    They are made first: with DynamicVRAM a new network has no weights.
    """
    for number in (0, 1):
        state(number), lora(number)
    experts()  # the defaults of `samples`
    with torch.inference_mode():
        yield sample(core(diffusion.load_model(KIND, state(0)), lora(0), 0.8))
    state.cache_clear()


@functools.cache
def state(number):
    return diffusion.random_weights(KIND, number)


def load(number=0, **options):
    """A MODEL that ComfyUI can load again without DynamicVRAM."""
    import comfy.sd

    dtype = {"dtype": torch.float32}
    model = comfy.sd.load_diffusion_model_state_dict(dict(state(number)), dtype, **options)
    model.cached_patcher_init = load, (number,)
    return model


def two_experts(models, strength):
    """A run of Wan Sampler (Fast) with a LoRA each; None: without."""
    stacks = ("loras_high", 0), ("loras_low", 1)
    given = {name: stack(lora(seed), strength) for name, seed in stacks if strength}
    known = {"model_high": models[0], "model_low": models[1], "cfg_high": "4", "cfg_low": "3"}
    return samples(steps=2, **known, **given)


def test_loras_unload_nothing_of_dynamic_models(expected, inference, monkeypatch):
    """In prompts with a LoRA, the same one and another strength, each after a text is encoded.

    Neither the text encoder and an expert fit into the memory, nor an expert alone.
    """
    import comfy.model_management

    latents, loads = [], [("loaded", name) for name in ("text encoder", "high", "low")]
    for strengths in ([None], [0.8, 0.8, 0.5]):
        with monkeypatch.context() as patch:
            cards = Cards(patch)
            encoder = cards.text_encoder(11 * GB)
            names = enumerate(("high", "low"))
            models = [cards.name(load(seed), name, 28 * GB) for seed, name in names]
            for strength in strengths:
                with a_prompt(encoder):
                    comfy.model_management.load_models_gpu([encoder], memory_required=GB)
                    cards.call(encoder.model)
                with a_prompt(*models):
                    latents.append(two_experts(models, strength))
            assert cards.events == loads * len(strengths)
    assert relative_error(latents[-1], latents[0]) > loras.EFFECT


@pytest.mark.parametrize("dynamic", [True, False])
def test_comfyui_loads_and_unloads_the_bank(expected, inference, monkeypatch, dynamic):
    """Runs in each mode equal ComfyUI's loader, also on a static copy of a dynamic model.

    TorchCompileModel makes such a copy, and hooks in conditionings do.
    """
    import comfy.model_management as management

    cards = Cards(monkeypatch, dynamic=dynamic)
    (device,) = cards.devices
    plain = cards.name(load(), "model", 14 * GB)
    for mode in loras.UNMERGED:
        model = fast(plain, lora(0), 0.8, mode)
        assert model.patches_uuid == plain.patches_uuid
        (bank,) = model.get_additional_models()
        assert (size := bank.model_size()) > 2**17
        assert bank.loaded_size() == 0
        assert relative_error(sample(model), expected) < loras.ROUNDING
        assert bank.loaded_size() == (0 if dynamic else size)  # it is given back after a run
        management.load_models_gpu([model, *model.get_nested_additional_models()])
        cards.call(model.model)
        (entry,) = (each for each in management.current_loaded_models if each.model is bank)
        assert entry.device == bank.current_loaded_device() == device
        assert entry.model_loaded_memory() == entry.model_memory() == size
        assert cards.free(device) <= 10 * GB - size
        management.free_memory(1e30, device)
        assert not [each for each in management.current_loaded_models if each.model is bank]
        assert bank.loaded_size() == 0
        assert cards.free(device) == 24 * GB
    with monkeypatch.context() as patch:
        patch.setattr("fast_video_vae.nodes.lora.apply._MOST_OF_DEVICE", 1e-9)
        model = fast(load(), lora(0), 0.8)
    assert not model.get_additional_models()  # a large bank stays on the host
    assert relative_error(sample(model), expected) < loras.ROUNDING
    small = load()
    before, without, patched = loras.bits(small), sample(small), fast(small, lora(0), 0.8)
    for each in (patched, patched.clone(disable_dynamic=True), patched):
        assert relative_error(sample(each), expected) < loras.ROUNDING
    assert torch.equal(sample(small), without)
    management.unload_all_models()
    assert loras.bits(small) == before


def split(model):
    """A model after MultiGPU CFG Split."""
    return v3_node("nodes_multigpu", "MultiGPUCFGSplitNode", model=model, max_gpus=2)[0]


def parts(model):
    """The patchers of all cards, and their banks."""
    found = [model, *model.get_additional_models_with_key("multigpu")]
    banks = [each for one in found for each in one.get_additional_models()]
    return found, [each for each in banks if not each.is_multigpu_base_clone]


@pytest.fixture
def two(dynamic, expected, inference, monkeypatch):
    """A machine with two cards."""
    # The patchers of MultiGPU refer to each other, and ComfyUI's `free_memory` fails if the garbage
    # collector frees one of them while it runs.
    gc.collect()
    gc.disable()
    yield Cards(monkeypatch, 2, dynamic=dynamic)
    gc.enable()


# Orders of the nodes: MultiGPU CFG Split, and Apply LoRA (Fast) with the LoRA of this number.
ROWS = [
    (("split", 0), "auto", True),
    ((0, "split", 1), "bypass", False),
]


@pytest.mark.parametrize(("order", "mode", "dynamic"), ROWS)
def test_a_run_on_two_cards_equals_that_on_one(two, order, mode):
    """With a strength for each step.

    The threads of both cards start a step at once. Each has its bank, which ComfyUI counts and
    frees; with the models the banks go, too.
    """
    import comfy.model_management as management

    barrier = threading.Barrier(2)

    def call(apply_model, given):
        barrier.wait(timeout=60)
        patcher = apply_model.__self__.current_patcher
        _, (bank, *_) = parts(patcher)
        (entry,) = (each for each in management.current_loaded_models if each.model is bank)
        assert entry.device == bank.current_loaded_device() == patcher.load_device
        assert entry.model_loaded_memory() == entry.model_memory() > 2**17
        return apply_model(given["input"], given["timestep"], **given["c"])

    def after(model, nodes):
        for node in nodes:
            one = node == "split"
            model = split(model) if one else fast(model, lora(node), "0.9,0,-0.4", mode)
        return model

    model = load()
    without, (both, _) = sample(split(model), steps=3), parts(split(model))
    before = [loras.bits(each) for each in both]
    alone = after(model, [node for node in order if node != "split"])
    expected = sample(alone, steps=3)
    assert relative_error(expected, without) > loras.EFFECT
    given = after(model, order)
    assert [each.load_device for each in parts(given)[0]] == two.devices
    assert parts(given)[0][1].model is both[1].model
    given.set_model_unet_function_wrapper(call)
    for each in (given, split(alone), alone):  # also with the state of a run on one card
        assert relative_error(sample(each, steps=3), expected) < loras.ROUNDING
    assert loras.session_of(given)  # the only one: the other bank goes with its copy
    plain = split(model)
    assert relative_error(sample(plain, steps=3), without) < loras.ROUNDING
    assert not parts(plain)[1]
    with a_prompt(given):
        sample(given)
        found, banks = parts(given)
        for device, bank in zip(two.devices, banks, strict=True):
            management.free_memory(1e30, device)
            assert bank.loaded_size() == 0
    management.unload_all_models()
    assert [loras.bits(each) for each in found] == before
    freed = [weakref.ref(each.model) for each in (*found, *banks)]
    del model, both, alone, given, plain, each, found, banks, bank
    gc.collect()
    management.cleanup_models()
    assert [each() for each in freed] == [None] * 4


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_model_that_is_moved_has_its_lora(two, dynamic, expected):
    """By Select Model Device, which takes the stand-in cards for the host."""
    model = fast(load(), lora(0), 0.8)
    if dynamic:
        model = model.deepclone_multigpu(new_load_device=two.devices[1])
    else:
        (model,) = v3_node("nodes_multigpu", "SelectModelDeviceNode", model=model, device="cpu")
    assert relative_error(sample(model), expected) < loras.ROUNDING
    assert parts(model)[1][0].load_device == model.load_device != two.devices[0]
