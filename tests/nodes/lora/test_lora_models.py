"""LoRAs on whole models against ComfyUI's loader; the reports of weak ones; saved models."""

import functools
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.lora.lora_errors import fp8
from fast_video_vae.tests.nodes.lora.lora_models import (
    ALL,
    EFFECT,
    KINDS,
    MODES,
    ROUNDING,
    UNMERGED,
    apply,
    bits,
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
def by_core(kind, *strengths, blocks=""):
    """Return the model after ComfyUI's loaders, one after the other; of a block its part alone."""
    model, state, _ = plain(kind)
    for seed, strength in enumerate(strengths):
        name = lora(seed, kind)
        if blocks:
            file = lora_for(state, seed=seed)
            part = {key: value for key, value in file.items() if f"blocks.{blocks}." in key}
            name = save_lora(part, f"{kind}-block.safetensors")
        model = core(model, name, strength)
    return sample(model, kind)


def of_strengths(*strengths, blocks=""):
    """A way to apply LoRAs by one stack."""

    def applied(model, kind, mode):
        given = None
        for seed, strength in enumerate(strengths):
            given = stack(lora(seed, kind), strength, blocks, before=given)
        return apply(model, given, mode)[0]

    return applied, {"strengths": strengths, "blocks": blocks}


def one_after_the_other(model, kind, mode):
    return fast(fast(model, lora(0, kind), 0.8, mode), lora(1, kind), -0.5, mode)


WAYS = {
    "one": of_strengths(0.8),
    "negative": of_strengths(-1.0),
    "large": of_strengths(3.5),
    "two": of_strengths(0.8, -0.5),
    "two nodes": (one_after_the_other, {"strengths": (0.8, -0.5), "blocks": ""}),
    "one block": of_strengths(0.8, blocks="0"),
}


@each_value_once(kind=KINDS, mode=MODES)
def test_a_run_of_every_kind_equals_that_of_comfyuis_loader(kind, mode):
    check_way(kind, mode, "one")


@each_value_once(mode=MODES, way=list(WAYS)[1:])
def test_a_run_of_any_stack_equals_that_of_comfyuis_loaders(mode, way):
    check_way(KIND, mode, way)


def check_way(kind, mode, way):
    applied, given = WAYS[way]
    model, _, without = plain(kind)
    expected = by_core(kind, *given["strengths"], blocks=given["blocks"])
    assert relative_error(expected, without) > EFFECT
    assert relative_error(sample(applied(model, kind, mode), kind), expected) < ROUNDING
    assert torch.equal(sample(model, kind), without)


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
    kind, ways = "wan21-i2v", {}
    for mode in UNMERGED:
        model = fast(plain(kind)[0], lora(0, kind), 0.8, mode)
        sample(model, kind)
        counts = session_of(model).counts
        assert not counts.unserved
        ways[mode] = counts.stream, counts.bypass
    stream, bypass, auto = ways["stream"], ways["bypass"], ways["auto"]
    assert stream[1] == 0
    assert bypass[0] == 2  # the patch embedding, a convolution, once a step
    assert sum(bypass) == sum(stream) == sum(auto) > 2
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


@each_value_once(mode=UNMERGED, second=["another", "none", "the same"])
def test_a_guider_of_two_models_applies_the_loras_of_each(mode, second):
    """It calls the second model with the options of the first; their LoRAs differ."""
    state = plain(KIND)[1]

    def pair(apply):
        one = apply(load_model(KIND, state), lora(0, KIND), 0.8)
        if second == "the same":
            return one, one
        other = load_model(KIND, state)
        return one, apply(other, lora(1, KIND), 0.6) if second == "another" else other

    with torch.inference_mode():
        expected = _dual(*pair(core), KIND)
        models = pair(functools.partial(fast, mode=mode))
        for _ in range(2):
            assert relative_error(_dual(*models, KIND), expected) < ROUNDING
    assert second == "the same" or relative_error(expected, by_core(KIND, 0.8)) > EFFECT
    assert relative_error(sample(models[0], KIND), by_core(KIND, 0.8)) < ROUNDING


def weak(amount):
    """Return a LoRA whose deltas are `amount` of the weights."""
    tensors = lora_for(random_weights(KIND), parts=("pairs",), amount=amount)
    return save_lora(tensors, f"weak-{amount}.safetensors")


@pytest.fixture
def model():
    """A model that computes and is stored in bfloat16."""
    return stored(torch.bfloat16)


def stored(dtype):
    state = {key: value.bfloat16() for key, value in random_weights(KIND).items()}
    model = load_model(KIND, state, dtype=dtype)
    model.model.manual_cast_dtype = torch.bfloat16  # as on a GPU
    return model


def said(report):
    """Return the percentage and the number of layers in the line on small deltas; None: no line."""
    (line,) = [each for each in report.splitlines() if "small deltas" in each] or [None]
    if line is None:
        return None
    layers = re.search(r"for (\d+) layers", line)
    return int(re.search(r"(\d+) %|(\d+)%", line).group(0).rstrip(" %")), layers and int(layers[1])


# The mode, the size of the deltas, strength and blocks, and the percentage that is said.
SAID = [
    ("stream", 0.1, "1", "", None),
    ("merged", 0.003, "1", "", 93),
    ("stream", 0.001, "1", "", 53),
    ("merged", 0.0003, "1", "", 18),
    ("bypass", 0.001, "1", "", None),
    # The largest strength of a run counts.
    ("stream", 0.001, "100", "", None),
    ("stream", 0.001, "1,100", "", None),
    ("stream", 0.001, "1", "0=100", None),
]


@pytest.mark.parametrize(("mode", "amount", "strength", "blocks", "percent"), SAID)
def test_the_report_says_how_much_survives(model, mode, amount, strength, blocks, percent):
    models = [model] if mode == "merged" else [model, stored(torch.float8_e4m3fn)]
    for each in models:
        found = said(apply(each, stack(weak(amount), strength, blocks), mode)[1])
        if percent is None:
            assert found is None
        else:
            assert found[0] == pytest.approx(percent, abs=6)
    assert said(apply(load_model(KIND), stack(weak(amount), strength, blocks), mode)[1]) is None


def test_auto_bypasses_weak_loras_and_says_so(model):
    assert said(apply(model, stack(weak(0.1)), "auto")[1]) is None
    patched, report = apply(model, stack(weak(0.001)), "auto")
    sample(patched)
    session = session_of(patched)
    layers = session.bank.layers.values()
    linear = sum(layer.rank > 0 and len(layer.shape) == 2 for layer in layers)
    assert said(report) == (pytest.approx(53, abs=6), linear)
    assert session.counts.stream <= 2 * 2  # the patch embedding, which is a convolution
    assert session.counts.bypass > 0


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_the_report_names_differences_from_comfyuis_loader(mode):
    import folder_paths

    tensors = lora_for(random_weights(KIND), rank=8, parts=("pairs",))
    name = "diffusion_model.blocks.0.self_attn.q"
    tensors[f"{name}.diff"] = 0.1 * torch.randn(128, 128)
    plain = {key: value for key, value in tensors.items() if not key.endswith("alpha")}
    path = folder_paths.get_full_path("loras", save_lora(plain, "conventions.safetensors"))
    metadata = {"lora_adapter_metadata": '{"transformer.lora_alpha": 16, "transformer.r": 8}'}
    save_file(plain, path, metadata)
    report = apply(load_model(KIND), stack("conventions.safetensors"), mode)[1]
    assert "alpha 16 by its metadata, in ComfyUI's loader the rank" in report
    assert "1 weights have an adapter and a difference: both are applied" in report
    report = apply(load_model(KIND), stack(weak(0.1)), mode)[1]
    assert "in ComfyUI's loader" not in report


@torch.inference_mode()
def saved(model, output):
    """Return the model that ModelSave saves, loaded again."""
    import comfy.sd
    from comfy_extras.nodes_model_merging import ModelSave

    node = ModelSave()
    node.output_dir = str(output)
    node.save(model, "saved")
    (path,) = Path(output).rglob("saved*.safetensors")
    loaded = comfy.sd.load_diffusion_model(str(path))
    path.unlink()
    return loaded


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_saved_model_has_the_lora(mode, output):
    model = load_model(KIND)
    without, before = sample(model), bits(model)
    name = save_lora(lora_for(random_weights(KIND), parts=ALL), "all.safetensors")
    patched = fast(model, name, 0.8, mode)
    expected = sample(patched)
    for each in (patched, patched.clone()):
        again = saved(each, output)
        assert bits(model) == before
        assert not model.backup
        assert relative_error(sample(again), expected) < ROUNDING
    assert relative_error(expected, without) > EFFECT
    assert torch.equal(sample(patched), expected)
    assert torch.equal(sample(model), without)


def test_two_applied_stacks_are_saved_and_other_loras_too(output):
    model = core(load_model(KIND), lora(2), 0.5)
    first = fast(model, lora(0), 0.8)
    second = apply(first, stack(lora(1), -0.5))[0]
    for each in (first, second):
        assert relative_error(sample(saved(each, output)), sample(each)) < ROUNDING
    assert relative_error(sample(saved(model, output)), sample(model)) < ROUNDING
    none = apply(second.clone(), stack(lora(1), 0))[0]
    assert relative_error(sample(saved(none, output)), sample(second)) < ROUNDING


@pytest.mark.parametrize("strength", ["0.9,0.8", "1@0-0.5", "0;1", "1;0.3"])
def test_a_strength_that_changes_is_not_saved(strength, output):
    patched = fast(load_model(KIND), lora(0), strength)
    why = f"strength {strength} changes during a run; set one number"
    with refused(f"cannot be saved with the model: {why}"):
        saved(patched, output)
    assert not list(Path(output).rglob("*.safetensors"))


def test_the_phase_of_a_model_is_saved(output):
    model = load_model(KIND)
    for phase, strength in (("high", 1.0), ("low", 0.3)):
        patched = apply(model, stack(lora(0), "1;0.3"), "auto", phase)[0]
        expected = sample(core(model, lora(0), strength))
        assert relative_error(sample(saved(patched, output)), expected) < ROUNDING
        merged = apply(model, stack(lora(0), "1;0.3"), "merged", phase)[0]
        assert relative_error(sample(merged), expected) < ROUNDING


def test_quantised_weights_are_not_saved(inference, output):
    state = random_weights(KIND)
    patched = fast(load_model(KIND, fp8(state)), lora(0))
    with refused(r"cannot be saved with the model: \S+ is QuantizedTensor"):
        saved(patched, output)
