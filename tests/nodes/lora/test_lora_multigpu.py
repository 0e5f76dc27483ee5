"""Apply LoRA (Fast) with ComfyUI's MultiGPU CFG Split: each card has a part of a step and a bank.

The cards are stand-ins on the host (`cards`).
"""

import functools
import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.lora.cards import KIND, Cards, a_prompt
from fast_video_vae.tests.nodes.lora.lora_models import (
    EFFECT,
    ROUNDING,
    UNMERGED,
    apply,
    bits,
    lora,
    random_weights,
    relative_error,
    sample,
    stack,
)
from fast_video_vae.tests.nodes.sampling.sampler_models import experts, samples
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def files(comfyui, tmp_path_factory):
    """The file of each expert; weights and LoRAs are made before DynamicVRAM is on."""
    folder, paths = tmp_path_factory.mktemp("experts"), []
    for seed in (0, 1):
        lora(seed)
        paths.append(folder / f"expert-{seed}.safetensors")
        save_file(random_weights(KIND, seed), paths[-1])
    experts()  # the defaults of `samples`
    return paths


KINDS = ["DynamicVRAM", "static"]


@pytest.fixture
def kind():
    """The kind of ComfyUI's patchers, where a test has no parameter of this name."""
    return KINDS[0]


@pytest.fixture
def cards(kind, files, inference, monkeypatch):
    # The patchers of MultiGPU refer to each other, and ComfyUI's `free_memory` fails if the garbage
    # collector frees one of them while it runs.
    gc.collect()
    gc.disable()
    yield Cards(monkeypatch, 2, dynamic=kind == "DynamicVRAM")
    gc.enable()
    reference.cache_clear()


def load(files, seed=0):
    """A MODEL that ComfyUI can load again for another card."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(files[seed]), {"dtype": torch.float32})


def split(model, most=2):
    """A model after MultiGPU CFG Split."""
    (model,) = v3_node("nodes_multigpu", "MultiGPUCFGSplitNode", model=model, max_gpus=most)
    return model


def fast(model, seed=0, mode="auto", strength="0.8"):
    """A model after Apply LoRA (Fast)."""
    return apply(model, stack(lora(seed), strength), mode)[0]


@functools.cache
def reference(path, mode, *loras, **options):
    """The latent of a model with LoRAs on one card; each is a seed and a strength."""
    model = load([path])
    for seed, strength in loras:
        model = fast(model, seed, mode, strength)
    return sample(model, **options)


def parts(model):
    """The patchers of all cards."""
    return [model, *model.get_additional_models_with_key("multigpu")]


def banks(patcher):
    """The additional models of one card's patcher."""
    found = patcher.get_additional_models()
    return [each for each in found if not each.is_multigpu_base_clone]


ORDERS = {
    "split, apply": lambda model, mode: fast(split(model), 0, mode),
    "apply, split": lambda model, mode: split(fast(model, 0, mode)),
    "split, apply, apply": lambda model, mode: fast(fast(split(model), 0, mode), 1, mode),
    "apply, split, apply": lambda model, mode: fast(split(fast(model, 0, mode)), 1, mode),
    "apply, split, split": lambda model, mode: split(split(fast(model, 0, mode))),
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
def test_a_run_on_two_cards_equals_that_on_one(cards, files, order, mode):
    import comfy.model_management

    loras = [(seed, "0.8") for seed in range(order.count("apply"))]
    model = load(files)
    expected, without = reference(files[0], mode, *loras), sample(split(model))
    assert relative_error(expected, without) > EFFECT
    given = ORDERS[order](model, mode)
    assert [each.load_device for each in parts(given)] == cards.devices
    before = [bits(each) for each in parts(given)]
    for _ in range(2):
        assert relative_error(sample(given), expected) < ROUNDING
    comfy.model_management.unload_all_models()
    assert [bits(each) for each in parts(given)] == before
    assert relative_error(sample(split(model)), without) < ROUNDING


@two_rows
def test_each_card_has_its_bank_and_comfyui_counts_it(cards, files, order):
    """After that all is freed: the bank of each card, and with the models the banks themselves."""
    import comfy.model_management as management

    given, found = ORDERS[order](load(files), "auto"), {}

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
        assert {*found} == {*cards.devices}
        one, other = found.values()
        assert one is not other
        for device, part in zip(cards.devices, parts(given), strict=True):
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
def test_a_list_has_a_strength_for_each_step_on_both_cards(cards, files, mode):
    """The same LoRA runs on one card before and after: it has state on the host and on cards."""
    given = fast(load(files), 0, mode, "0.9,0,-0.4")
    expected = sample(given, steps=3)
    assert relative_error(sample(split(given), steps=3), expected) < ROUNDING
    assert relative_error(sample(given, steps=3), expected) < ROUNDING


def test_cards_that_start_at_once_have_the_same_strength(cards, files):
    """A thread per card runs each step. Where they race, a card missed its LoRA in 3 of 10 runs."""
    barrier = threading.Barrier(2)

    def call(apply_model, given):
        barrier.wait(timeout=60)
        return apply_model(given["input"], given["timestep"], **given["c"])

    expected = reference(files[0], "bypass", (0, "0.8"), steps=1)
    model = split(load(files))
    model.set_model_unet_function_wrapper(call)
    for _ in range(12):
        given = fast(model, 0, "bypass")
        assert relative_error(sample(given, steps=1), expected) < ROUNDING


def test_the_loaded_copy_gets_another_lora(cards, files):
    """MultiGPU CFG Split uses the copy of the last run again, which has that run's LoRA."""
    model = load(files)
    last = split(fast(model))
    copy = parts(last)[1].model
    sample(last)
    for seed, strength in ((1, "0.8"), (1, "-0.3"), (0, "0.8")):
        given = split(fast(model, seed, strength=strength))
        assert parts(given)[1].model is copy
        expected = reference(files[0], "auto", (seed, strength))
        assert relative_error(sample(given), expected) < ROUNDING
        assert len(banks(parts(given)[1])) == 1
    without = split(model)
    assert parts(without)[1].model is copy
    assert relative_error(sample(without), reference(files[0], "auto")) < ROUNDING
    assert not banks(parts(without)[1])


@pytest.mark.parametrize("to", ["another card", "the host"])
def test_a_model_that_is_moved_has_its_lora(cards, files, to):
    model = fast(load(files))
    if to == "the host":
        (model,) = v3_node("nodes_multigpu", "SelectModelDeviceNode", model=model, device="cpu")
        assert model.load_device == torch.device("cpu")
    else:  # this node calls this method, but it takes the stand-in cards for the host
        model = model.deepclone_multigpu(new_load_device=cards.devices[1])
        (bank,) = banks(model)
        assert model.load_device == bank.load_device == cards.devices[1]
    assert relative_error(sample(model), reference(files[0], "auto", (0, "0.8"))) < ROUNDING


@pytest.mark.parametrize(
    ("where", "mode", "kind"),
    [("before", "auto", KINDS[0]), ("after", "stream", KINDS[1]), ("sampler", "bypass", KINDS[0])],
)
def test_wan_sampler_runs_both_experts_on_two_cards(cards, files, where, mode):
    names, more = ("high", "low"), {"cfg_high": "4", "cfg_low": "3", "lora_mode": mode}
    stacks = {f"loras_{name}": stack(lora(seed), "0.8") for seed, name in enumerate(names)}
    models = {f"model_{name}": load(files, seed) for seed, name in enumerate(names)}
    expected, without = samples(**models, **more, **stacks), samples(**models, **more)
    assert relative_error(expected, without) > EFFECT
    place = {
        "before": lambda model, seed: split(fast(model, seed, mode)),
        "after": lambda model, seed: fast(split(model), seed),
        "sampler": lambda model, seed: split(model),
    }[where]
    given = {name: place(model, seed) for seed, (name, model) in enumerate(models.items())}
    if where == "sampler":
        more |= stacks
    for _ in range(2):
        with a_prompt(*given.values()):
            assert relative_error(samples(**given, **more), expected) < ROUNDING
