"""LoRAs on whole models of ComfyUI: runs of its sampler, against runs with its LoRA loader."""

import functools
import gc
import logging
import weakref

import pytest
import torch

from fast_video_vae.tests.nodes.lora.lora_models import (
    EFFECT,
    KINDS,
    MODES,
    ROUNDING,
    UNMERGED,
    apply,
    core,
    fast,
    inputs,
    load_model,
    lora,
    lora_for,
    random_weights,
    relative_error,
    sample,
    save_lora,
    session_of,
    stack,
)
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

KIND = "wan21-t2v"


@pytest.fixture(scope="module", autouse=True)
def _models_go_with_the_module():
    yield
    for function in (plain, by_core):
        function.cache_clear()


@functools.cache
def plain(kind):
    """A model, its weights and what it gives without a LoRA."""
    state = random_weights(kind)
    model = load_model(kind, state)
    return model, state, sample(model, kind)


@functools.cache
def by_core(kind, *strengths):
    """Return the model after ComfyUI's loaders, one after the other."""
    model = plain(kind)[0]
    for seed, strength in enumerate(strengths):
        model = core(model, lora(seed, kind), strength)
    return sample(model, kind)


@each_value_once(kind=KINDS, mode=MODES)
def test_a_run_equals_that_of_comfyuis_loader(kind, mode):
    model, _, without = plain(kind)
    expected = by_core(kind, 0.8)
    assert relative_error(expected, without) > EFFECT
    assert relative_error(sample(fast(model, lora(0, kind), 0.8, mode), kind), expected) < ROUNDING
    assert torch.equal(sample(model, kind), without)


@each_value_once(kind=["wan21-t2v", "qwen-image"], mode=MODES)
def test_two_loras_equal_two_loaders_in_series(kind, mode):
    given = stack(lora(1, kind), -0.5, before=stack(lora(0, kind), 0.8))
    result = sample(apply(plain(kind)[0], given, mode)[0], kind)
    assert relative_error(result, by_core(kind, 0.8, -0.5)) < ROUNDING
    first = fast(plain(kind)[0], lora(0, kind), 0.8, mode)
    second = fast(first, lora(1, kind), -0.5, mode)
    assert relative_error(sample(second, kind), by_core(kind, 0.8, -0.5)) < ROUNDING
    assert relative_error(sample(first, kind), by_core(kind, 0.8)) < ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_strengths_of_any_size_and_sign_work(mode):
    for strength in (-1.0, 3.5):
        result = sample(fast(plain(KIND)[0], lora(0, KIND), strength, mode), KIND)
        assert relative_error(result, by_core(KIND, strength)) < ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_strength_0_gives_the_model_itself(mode):
    model, _, without = plain(KIND)
    patched, report = apply(model, stack(lora(0, KIND), 0), mode)
    assert torch.equal(sample(patched, KIND), without)
    assert patched.patches_uuid == model.patches_uuid or mode == "merged"
    assert "keys applied" not in report


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_comfyui_skips_are_changed_too(mode):
    """ComfyUI's loader accepts `modulation.diff` without effect, so the test edits the weights."""
    model, state, without = plain(KIND)
    difference = lora_for(state, parts=("modulations",))
    name = save_lora(difference, "modulations.safetensors")
    assert torch.equal(sample(core(model, name, 0.8), KIND), without)
    edited = {
        key: value + 0.8 * difference.get(f"diffusion_model.{key}.diff", torch.tensor(0.0))
        for key, value in state.items()
    }
    assert len(difference) == 3
    expected = sample(load_model(KIND, edited), KIND)
    assert relative_error(expected, without) > EFFECT
    assert relative_error(sample(fast(model, name, 0.8, mode), KIND), expected) < ROUNDING
    assert torch.equal(sample(model, KIND), without)


def test_every_mode_applies_the_requested_method():
    kind = "wan21-i2v"
    ways = {}
    for mode in UNMERGED:
        model = fast(plain(kind)[0], lora(0, kind), 0.8, mode)
        sample(model, kind)
        counts = session_of(model).counts
        assert not counts.unserved
        ways[mode] = counts.stream, counts.bypass
    stream, bypass, auto = ways["stream"], ways["bypass"], ways["auto"]
    assert stream[0] > 0
    assert stream[1] == 0
    assert bypass[1] > 0
    assert sum(bypass) == sum(stream) == sum(auto)
    assert bypass[0] == 2  # the patch embedding, a convolution, once a step
    # 257 tokens of an image are more than 128 x 128 numbers are worth, 8 of text fewer.
    assert min(auto) > bypass[0]


def test_a_run_is_timed_on_request(monkeypatch, caplog):
    model = fast(plain(KIND)[0], lora(0, KIND), 0.8, "bypass")
    for asked in (False, True):
        monkeypatch.setenv("WAN_LORA_TIMING", str(int(asked)))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            sample(model, KIND)
        tables = [text.split("\n") for text in caplog.messages if "LoRA in a run of" in text]
        assert len(tables) == asked
    kinds = {row.split()[0]: row.split()[1:] for row in tables[0][1:]}
    assert list(kinds) == ["stream", "bypass", "formula", "held"]
    assert int(kinds["bypass"][0]) > 0
    assert float(kinds["bypass"][2]) > 0


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_list_has_a_strength_for_each_step(mode):
    """The run of three steps is those steps taken one by one, with loaders of ComfyUI's."""
    model = plain(KIND)[0]
    models = [core(model, lora(0, KIND), each) for each in (0.9, 0.0, -0.4)]
    result = sample(fast(model, lora(0, KIND), "0.9,0,-0.4", mode), KIND, steps=3)
    assert relative_error(result, _stepwise(models, KIND)) < ROUNDING


def _stepwise(models, kind):
    """Run one step with each of the models."""
    import comfy.sample

    noise, positive, negative = inputs(kind)
    latent = torch.zeros_like(noise)
    for step, model in enumerate(models):
        with torch.inference_mode():
            latent = comfy.sample.sample(
                model, noise * (step == 0), len(models), 4.0, "euler", "simple",
                positive, negative, latent, seed=1, disable_pbar=True,
                start_step=step, last_step=step + 1,
                disable_noise=step > 0, force_full_denoise=step == len(models) - 1,
            )  # fmt: skip
    return latent


@pytest.mark.parametrize("mode", MODES)
def test_only_blocks_of_the_filter_are_changed(mode):
    model, state, _ = plain(KIND)
    file = lora_for(state, seed=0)
    second = {key: value for key, value in file.items() if "blocks.1." in key}
    expected = sample(core(model, save_lora(second, "second.safetensors"), 0.8), KIND)
    given = stack(lora(0, KIND), 0.8, blocks="1")
    assert relative_error(sample(apply(model, given, mode)[0], KIND), expected) < ROUNDING


def _both(one, other):
    """A model whose call with the text is one's, and whose call without it is the other's."""
    import comfy.samplers

    def call(args):
        positive, negative = args["conds"]
        model, x, sigma, options = (
            args[name] for name in ("model", "input", "sigma", "model_options")
        )
        # The sampler's own model.
        own = {"wrappers": other.wrappers}
        own["sample_sigmas"] = options["transformer_options"]["sample_sigmas"]
        theirs = other.model_options["transformer_options"] | own
        theirs = other.model_options | {"transformer_options": theirs}
        calls = (model, positive, options), (other.model, negative, theirs)
        return [
            comfy.samplers.calc_cond_batch(base, [conditioning], x, sigma, given)[0]
            for base, conditioning, given in calls
        ]

    both = one.clone()
    both.set_model_sampler_calc_cond_batch_function(call)
    return both


@pytest.mark.parametrize("mode", UNMERGED)
def test_two_branches_of_a_step_have_separate_loras(mode):
    import comfy.model_management

    model, state, _ = plain(KIND)
    one, other = fast(model, lora(0, KIND), 0.8, mode), fast(model, lora(1, KIND), 0.6, mode)
    result = sample(_both(one, other), KIND)
    # ComfyUI's loaders change the weights of a model, so that there have to be two.
    loaded = core(load_model(KIND, state), lora(1, KIND), 0.6)
    comfy.model_management.load_models_gpu([loaded])
    loaded.pre_run()
    expected = sample(_both(core(model, lora(0, KIND), 0.8), loaded), KIND)
    assert relative_error(expected, by_core(KIND, 0.8)) > EFFECT
    assert relative_error(result, expected) < ROUNDING


def _dual(one, other, kind):
    """A run of ComfyUI's guider of two models."""
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    noise, positive, negative = inputs(kind)
    (guider,) = DualModelGuider.execute(one, positive, 4.0, other, negative).args
    sampling = one.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 2)
    euler = comfy.samplers.sampler_object("euler")
    return guider.sample(noise, torch.zeros_like(noise), euler, sigmas, disable_pbar=True, seed=1)


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_guider_of_two_models_applies_one_lora(mode):
    model, state, without = plain(KIND)
    name = save_lora(lora_for(state, parts=("modulations", "pairs")), "all.safetensors")
    patched = fast(model, name, 0.8, mode)
    expected = sample(patched, KIND)
    with torch.inference_mode():
        for _ in range(2):
            assert relative_error(_dual(patched, patched, KIND), expected) < ROUNDING
    assert torch.equal(sample(patched, KIND), expected)
    assert torch.equal(sample(model, KIND), without)


@each_value_once(mode=UNMERGED, second=[True, False])
def test_a_guider_of_two_models_applies_a_lora_to_each(mode, second):
    """It calls the second model with the options of the first; their LoRAs differ."""
    state = plain(KIND)[1]

    def pair(first, other):
        one, two = load_model(KIND, state), load_model(KIND, state)
        return first(one, lora(0, KIND), 0.8), other(two, lora(1, KIND), 0.6) if second else two

    def ours(*args):
        return fast(*args, mode)

    with torch.inference_mode():
        expected = _dual(*pair(core, core), KIND)
        result = _dual(*pair(ours, ours), KIND)
    assert relative_error(expected, by_core(KIND, 0.8)) > EFFECT
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_model_that_is_dropped_is_freed(mode):
    import comfy.model_management

    model = load_model(KIND)
    patched = fast(model, lora(0, KIND), 0.8, mode)
    sample(patched, KIND)
    base, bank = weakref.ref(model.model), weakref.ref(session_of(patched).bank)
    del model, patched
    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.cleanup_models()
    assert base() is None
    assert bank() is None


def test_the_bank_follows_a_model_to_another_device():
    """As Select Model Device moves a model; the other device here is a label of the CPU."""
    from fast_video_vae.nodes.lora.holder import KEY as NAME

    model = load_model(KIND)
    patched = fast(model, lora(0, KIND), 0.8)
    expected = sample(patched, KIND)
    moved = patched.clone()
    moved.load_device = torch.device("cpu", 1)
    assert relative_error(sample(moved, KIND), expected) < ROUNDING
    (holder,) = moved.get_additional_models_with_key(NAME)
    assert holder.load_device == moved.load_device
    (holder,) = patched.get_additional_models_with_key(NAME)
    assert holder.load_device == patched.load_device
    assert torch.equal(sample(patched, KIND), expected)
