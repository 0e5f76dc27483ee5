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
from torch import nn

from fast_video_vae.tests.nodes.lora.cards import GB, KIND, Cards, a_prompt
from fast_video_vae.tests.nodes.lora.lora_models import (
    EFFECT,
    ROUNDING,
    UNMERGED,
    apply,
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
from fast_video_vae.tests.nodes.vae.pairs import v3_node
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


KINDS = ["DynamicVRAM", "static"]


@pytest.fixture
def kind():
    """The kind of ComfyUI's patchers, where a test has no parameter of this name."""
    return KINDS[0]


@pytest.fixture
def two(kind, expected, inference, monkeypatch):
    """A machine with two cards."""
    # The patchers of MultiGPU refer to each other, and ComfyUI's `free_memory` fails if the garbage
    # collector frees one of them while it runs.
    gc.collect()
    gc.disable()
    yield Cards(monkeypatch, 2, dynamic=kind == "DynamicVRAM")
    gc.enable()
    reference.cache_clear()


def split(model, most=2):
    """A model after MultiGPU CFG Split."""
    (model,) = v3_node("nodes_multigpu", "MultiGPUCFGSplitNode", model=model, max_gpus=most)
    return model


def with_lora(model, seed=0, mode="auto", strength="0.8"):
    """A model after Apply LoRA (Fast)."""
    return apply(model, stack(lora(seed), strength), mode)[0]


@functools.cache
def reference(mode, *loras, **options):
    """The latent of a model with LoRAs on one card; each is a seed and a strength."""
    model = load()
    for seed, strength in loras:
        model = with_lora(model, seed, mode, strength)
    return sample(model, **options)


def parts(model):
    """The patchers of all cards."""
    return [model, *model.get_additional_models_with_key("multigpu")]


def banks(patcher):
    """The additional models of one card's patcher."""
    found = patcher.get_additional_models()
    return [each for each in found if not each.is_multigpu_base_clone]


ORDERS = {
    "split, apply": lambda model, mode: with_lora(split(model), 0, mode),
    "apply, split": lambda model, mode: split(with_lora(model, 0, mode)),
    "split, apply, apply": lambda model, mode: with_lora(with_lora(split(model), 0, mode), 1, mode),
    "apply, split, apply": lambda model, mode: with_lora(split(with_lora(model, 0, mode)), 1, mode),
    "apply, split, split": lambda model, mode: split(split(with_lora(model, 0, mode))),
}

ROWS = [
    ("split, apply", "auto", "DynamicVRAM"),
    ("apply, split", "stream", "DynamicVRAM"),
    ("split, apply, apply", "bypass", "static"),
    ("apply, split, apply", "auto", "static"),
    ("apply, split, split", "bypass", "DynamicVRAM"),
]
every_row = pytest.mark.parametrize(("order", "mode", "kind"), ROWS)
two_rows = pytest.mark.parametrize(
    ("order", "kind"), [("split, apply", "DynamicVRAM"), ("apply, split", "static")]
)


@every_row
def test_a_run_on_two_cards_equals_that_on_one(two, order, mode):
    import comfy.model_management

    loras = [(seed, "0.8") for seed in range(order.count("apply"))]
    model = load()
    expected, without = reference(mode, *loras), sample(split(model))
    assert relative_error(expected, without) > EFFECT
    given = ORDERS[order](model, mode)
    assert [each.load_device for each in parts(given)] == two.devices
    before = [bits(each) for each in parts(given)]
    for _ in range(2):
        assert relative_error(sample(given), expected) < ROUNDING
    comfy.model_management.unload_all_models()
    assert [bits(each) for each in parts(given)] == before
    assert relative_error(sample(split(model)), without) < ROUNDING


@two_rows
def test_each_card_has_its_bank_and_comfyui_counts_it(two, order):
    """After that all is freed: the bank of each card, and with the models the banks themselves."""
    import comfy.model_management as management

    given, found = ORDERS[order](load(), "auto"), {}

    def call(apply_model, given):
        patcher = apply_model.__self__.current_patcher
        (bank,) = banks(patcher)
        assert bank.load_device == bank.current_loaded_device() == patcher.load_device
        (entry,) = (each for each in management.current_loaded_models if each.model is bank)
        assert entry.device == bank.load_device
        assert entry.model_loaded_memory() == entry.model_memory() > 2**17
        found[entry.device] = bank.model
        return apply_model(given["input"], given["timestep"], **given["c"])

    given.set_model_unet_function_wrapper(call)
    with a_prompt(given):
        sample(given)
        assert {*found} == {*two.devices}
        one, other = found.values()
        assert one is not other
        for device, part in zip(two.devices, parts(given), strict=True):
            management.free_memory(1e30, device)
            assert [bank.loaded_size() for bank in banks(part)] == [0]
    assert not management.current_loaded_models
    modules = [each.model for part in parts(given) for each in (part, *banks(part))]
    assert len(modules) == 4
    freed = [weakref.ref(each) for each in modules]
    found.clear()
    del given, modules, one, other, part
    management.unload_all_models()
    gc.collect()
    management.cleanup_models()
    assert [each() for each in freed] == [None] * 4


@pytest.mark.parametrize("mode", UNMERGED[1:])
def test_a_list_has_a_strength_for_each_step_on_both_cards(two, mode):
    """The same LoRA runs on one card before and after: it has state on the host and on cards."""
    given = with_lora(load(), 0, mode, "0.9,0,-0.4")
    expected = sample(given, steps=3)
    assert relative_error(sample(split(given), steps=3), expected) < ROUNDING
    assert relative_error(sample(given, steps=3), expected) < ROUNDING


def test_cards_that_start_at_once_have_the_same_strength(two):
    """A thread per card runs each step. Where they race, a card missed its LoRA in 3 of 10 runs."""
    barrier = threading.Barrier(2)

    def call(apply_model, given):
        barrier.wait(timeout=60)
        return apply_model(given["input"], given["timestep"], **given["c"])

    expected = reference("bypass", (0, "0.8"), steps=1)
    model = split(load())
    model.set_model_unet_function_wrapper(call)
    for _ in range(12):
        given = with_lora(model, 0, "bypass")
        assert relative_error(sample(given, steps=1), expected) < ROUNDING


def test_the_loaded_copy_gets_another_lora(two):
    """MultiGPU CFG Split uses the copy of the last run again, which has that run's LoRA."""
    model = load()
    last = split(with_lora(model))
    copy = parts(last)[1].model
    sample(last)
    for seed, strength in ((1, "0.8"), (1, "-0.3"), (0, "0.8")):
        given = split(with_lora(model, seed, strength=strength))
        assert parts(given)[1].model is copy
        expected = reference("auto", (seed, strength))
        assert relative_error(sample(given), expected) < ROUNDING
        assert len(banks(parts(given)[1])) == 1
    without = split(model)
    assert parts(without)[1].model is copy
    assert relative_error(sample(without), reference("auto")) < ROUNDING
    assert not banks(parts(without)[1])


@pytest.mark.parametrize("to", ["another card", "the host"])
def test_a_model_that_is_moved_has_its_lora(two, to):
    model = with_lora(load())
    if to == "the host":
        (model,) = v3_node("nodes_multigpu", "SelectModelDeviceNode", model=model, device="cpu")
        assert model.load_device == torch.device("cpu")
    else:  # this node calls this method, but it takes the stand-in cards for the host
        model = model.deepclone_multigpu(new_load_device=two.devices[1])
        (bank,) = banks(model)
        assert model.load_device == bank.load_device == two.devices[1]
    assert relative_error(sample(model), reference("auto", (0, "0.8"))) < ROUNDING


@pytest.mark.parametrize(
    ("where", "mode", "kind"),
    [("before", "auto", KINDS[0]), ("after", "stream", KINDS[1]), ("sampler", "bypass", KINDS[0])],
)
def test_wan_sampler_runs_both_experts_on_two_cards(two, where, mode):
    names, more = ("high", "low"), {"cfg_high": "4", "cfg_low": "3", "lora_mode": mode}
    stacks = {f"loras_{name}": stack(lora(seed), "0.8") for seed, name in enumerate(names)}
    models = {f"model_{name}": load(seed) for seed, name in enumerate(names)}
    expected, without = samples(**models, **more, **stacks), samples(**models, **more)
    assert relative_error(expected, without) > EFFECT
    place = {
        "before": lambda model, seed: split(with_lora(model, seed, mode)),
        "after": lambda model, seed: with_lora(split(model), seed),
        "sampler": lambda model, seed: split(model),
    }[where]
    given = {name: place(model, seed) for seed, (name, model) in enumerate(models.items())}
    if where == "sampler":
        more |= stacks
    for _ in range(2):
        with a_prompt(*given.values()):
            assert relative_error(samples(**given, **more), expected) < ROUNDING
