"""LoRAs on whole models against ComfyUI's loader; the reports of weak ones; saved models."""

import functools
import logging
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import KIND, apply, core, fast, lora, sample, stack
from fast_video_vae.tests.nodes.vae.pairs import relative_error
from fast_video_vae.tests.products import each_value_once

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


@pytest.fixture(scope="module", autouse=True)
def _models_go_with_the_module():
    yield
    plain.cache_clear()


@functools.cache
def plain(kind=KIND):
    """A model, its weights and what it gives without a LoRA."""
    state = loras.random_weights(kind)
    model = loras.load_model(kind, state)
    return model, state, sample(model, kind)


@each_value_once(kind=loras.KINDS, mode=loras.MODES)
def test_a_run_of_every_kind_equals_that_of_comfyuis_loader(kind, mode):
    model, _, without = plain(kind)
    expected = sample(core(model, lora(0, kind), 0.8), kind)
    assert relative_error(expected, without) > loras.EFFECT
    assert (
        relative_error(sample(fast(model, lora(0, kind), 0.8, mode), kind), expected)
        < loras.ROUNDING
    )
    assert torch.equal(sample(model, kind), without)


@pytest.mark.parametrize("mode", loras.MODES)
def test_any_stacks_of_two_nodes_equal_comfyuis_loaders(mode):
    """Large and negative strengths, one block, a file twice, and parameters that ComfyUI skips.

    Its loader accepts `modulation.diff` without effect, so the test edits the weights.
    """
    model, state, without = plain()
    tables = loras.lora_for(state, parts=("modulations",))
    assert len(tables) == 3
    block = {
        key: value for key, value in loras.lora_for(state, seed=1).items() if "blocks.1" in key
    }
    edited = {
        key: value + 0.8 * tables.get(f"diffusion_model.{key}.diff", torch.tensor(0.0))
        for key, value in state.items()
    }
    expected = loras.load_model(KIND, edited)
    theirs = ((lora(0), 3.5), (loras.save_lora(block, "block.safetensors"), -0.5), (lora(0), -1.0))
    results = [sample(expected)]
    for name, strength in theirs:
        expected = core(expected, name, strength)
        results.append(sample(expected))
    first = stack(loras.save_lora(tables, "tables.safetensors"), 0.8)
    first = stack(lora(1), -0.5, "1", before=stack(lora(0), 3.5, before=first))
    patched, report = apply(apply(model, first, mode)[0], stack(lora(0), -1.0), mode)
    assert relative_error(sample(patched), results[-1]) < loras.ROUNDING
    changes = map(relative_error, [without, *results], results)
    assert min(changes) > loras.EFFECT
    assert mode == "merged" or f"{lora(0)} is used 2 times; the strengths add up" in report
    assert torch.equal(sample(model), without)


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_strength_0_gives_the_model_itself(mode):
    model, _, without = plain()
    patched, report = apply(model, stack(lora(0), 0), mode)
    assert torch.equal(sample(patched), without)
    assert patched.patches_uuid == model.patches_uuid or mode == "merged"
    assert "keys applied" not in report


@pytest.mark.parametrize(
    ("mode", "variable", "expected"),
    [
        ("auto", None, "auto"),
        ("stream", "WAN_LORA_ONTHEFLY", "stream"),
        ("bypass", "WAN_LORA_STREAMING", "bypass"),
        ("auto", "WAN_LORA_STREAMING", "stream"),
        ("auto", "WAN_LORA_ONTHEFLY", "bypass"),
    ],
)
def test_a_mode_or_for_auto_the_environment_chooses_the_method(
    mode, variable, expected, monkeypatch
):
    for name in ("WAN_LORA_STREAMING", "WAN_LORA_ONTHEFLY"):
        monkeypatch.setenv(name, str(int(name == variable)))
    kind = "wan21-i2v"
    model = fast(plain(kind)[0], lora(0, kind), 0.8, mode)
    sample(model, kind)
    counts = loras.session_of(model).counts
    assert not counts.unserved
    assert (counts.bypass == 0) == (expected == "stream")
    # The patch embedding, a convolution, once a step. In auto also the layers that have the 257
    # tokens of an image, which are more than 128 x 128 numbers are worth.
    assert (counts.stream == 2) == (expected == "bypass")


def test_a_run_is_timed_on_request(monkeypatch, caplog):
    model = fast(plain()[0], lora(0), 0.8, "bypass")
    for asked in (False, True):
        monkeypatch.setenv("WAN_LORA_TIMING", str(int(asked)))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            sample(model)
        tables = [text.split("\n") for text in caplog.messages if "LoRA in a run of" in text]
        assert len(tables) == asked
    kinds = {row.split()[0]: row.split()[1:] for row in tables[0][1:]}
    assert list(kinds) == ["stream", "bypass", "formula", "held"]
    assert float(kinds["bypass"][2]) > 0


@pytest.mark.parametrize(
    ("mode", "strength", "steps"),
    [
        ("auto", "0.9,0,-0.4", (0.9, 0.0, -0.4)),
        ("bypass", "0.8,0.5@0.3-0.6", (0.0, 0.8, 0.0)),  # from 1/3 to 2/3
        ("stream", "0.8@sigma:0.98-0.1", (0.0, 0.8, 0.8)),
    ],
)
def test_a_schedule_has_a_strength_for_each_step(mode, strength, steps):
    """The run of three steps is those steps taken one by one, with loaders of ComfyUI's."""
    import comfy.sample

    model = plain()[0]
    noise, *texts = loras.inputs(KIND)
    latent = torch.zeros_like(noise)
    for step, value in enumerate(steps):
        with torch.inference_mode():
            latent = comfy.sample.sample(
                core(model, lora(0), value), noise * (step == 0), 3, 4.0, "euler", "simple",
                *texts, latent, seed=1, disable_pbar=True, start_step=step, last_step=step + 1,
                disable_noise=step > 0, force_full_denoise=step == 2,
            )  # fmt: skip
    result = sample(fast(model, lora(0), strength, mode), steps=3)
    assert relative_error(result, latent) < loras.ROUNDING


@torch.inference_mode()
def dual(one, other):
    """A run of ComfyUI's guider of two models."""
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    noise, positive, negative = loras.inputs(KIND)
    (guider,) = DualModelGuider.execute(one, positive, 4.0, other, negative).args
    sampling = one.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 2)
    euler = comfy.samplers.sampler_object("euler")
    return guider.sample(noise, torch.zeros_like(noise), euler, sigmas, disable_pbar=True, seed=1)


@each_value_once(mode=loras.UNMERGED, second=["another", "none", "the same"])
def test_a_guider_of_two_models_applies_the_loras_of_each(mode, second):
    """It calls the second model with the options of the first; their LoRAs differ."""

    def pair(apply):
        one, other = (loras.load_model(KIND, plain()[1]) for _ in range(2))
        one = apply(one, lora(0), 0.8)
        return one, {"another": apply(other, lora(1), 0.6), "none": other, "the same": one}[second]

    expected, models = dual(*pair(core)), pair(functools.partial(fast, mode=mode))
    for _ in range(2):
        assert relative_error(dual(*models), expected) < loras.ROUNDING
    alone = sample(core(plain()[0], lora(0), 0.8))
    assert second == "the same" or relative_error(expected, alone) > loras.EFFECT
    assert relative_error(sample(models[0]), alone) < loras.ROUNDING


# The mode, the dtype of the weights, the size of the deltas as a part of them, strength and blocks,
# and whether the report says that they are small.
WEAK = [
    ("auto", torch.bfloat16, 0.001, "1", "", True),
    ("auto", torch.bfloat16, 0.1, "1", "", False),
    ("stream", torch.bfloat16, 0.001, "1", "", True),
    ("stream", torch.float8_e4m3fn, 0.001, "1", "", True),
    ("stream", torch.bfloat16, 0.1, "1", "", False),
    ("merged", torch.bfloat16, 0.001, "1", "", True),
    ("merged", torch.bfloat16, 0.1, "1", "", False),
    ("bypass", torch.bfloat16, 0.001, "1", "", False),
    ("auto", torch.float32, 0.001, "1", "", False),
    ("merged", torch.float32, 0.001, "1", "", False),
    # The largest strength of a run counts.
    ("stream", torch.bfloat16, 0.001, "1,100", "", False),
    ("auto", torch.bfloat16, 0.001, "1", "0=100", False),
]


@pytest.mark.parametrize(("mode", "dtype", "amount", "strength", "blocks", "weak"), WEAK)
def test_auto_bypasses_weak_loras_and_reports_name_them(
    mode, dtype, amount, strength, blocks, weak
):
    compute = torch.float32 if dtype == torch.float32 else torch.bfloat16
    kind = "wan21-i2v"  # with enough tokens of an image for auto to stream
    state = plain(kind)[1]
    model = loras.load_model(
        kind, {key: value.to(compute) for key, value in state.items()}, dtype=dtype
    )
    model.model.manual_cast_dtype = compute  # as on a GPU
    linear = {key: value for key, value in state.items() if key.startswith("blocks.")}
    tensors = loras.lora_for(linear, parts=("pairs",), amount=amount)
    name = loras.save_lora(tensors, f"weak-{amount}.safetensors")
    patched, report = apply(model, stack(name, strength, blocks), mode)
    said = [line for line in report.splitlines() if line.startswith("small deltas")]
    assert len(said) == weak
    if mode == "auto":
        sample(patched, kind)
        counts = loras.session_of(patched).counts
        assert counts.bypass > 0
        assert (counts.stream == 0) == weak


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


def test_a_saved_model_has_its_loras(output):
    """Of all nodes before, also of other packs, and without a change of the model."""
    model = loras.load_model(KIND)
    theirs = core(model, lora(2), 0.5)
    first = fast(theirs, lora(0, parts=loras.ALL), 0.8)
    second = apply(first, stack(lora(1), -0.5))[0]
    none = apply(second.clone(), stack(lora(1), 0))[0]
    without, before = sample(model), loras.bits(model)
    for each in (first, second, second.clone(), none):
        expected = sample(each)
        again = saved(each, output)
        assert loras.bits(model) == before
        assert not model.backup
        assert relative_error(sample(again), expected) < loras.ROUNDING
        assert torch.equal(sample(each), expected)
    assert relative_error(sample(saved(theirs, output)), sample(theirs)) < loras.ROUNDING
    assert torch.equal(sample(model), without)


def test_the_phase_of_a_model_is_saved(output):
    model = loras.load_model(KIND)
    for phase, strength in (("high", 1.0), ("low", 0.3)):
        patched = apply(model, stack(lora(0), "1;0.3"), "auto", phase)[0]
        expected = sample(core(model, lora(0), strength))
        assert relative_error(sample(saved(patched, output)), expected) < loras.ROUNDING
        for each in (patched, apply(model, stack(lora(0), "1;0.3"), "merged", phase)[0]):
            assert relative_error(sample(each), expected) < loras.ROUNDING


@pytest.mark.parametrize("strength", ["0.9,0.8", "1@0-0.5", "1;0.3", "1"])
def test_what_cannot_be_merged_is_not_saved(strength, inference, output):
    """A strength that changes during a run, and with a constant one a quantised weight."""
    why = f"strength {strength} changes during a run; set one number"
    file = loras.random_weights(KIND)
    if strength == "1":
        file = loras.quantised(file, loras.FP8, lambda key: key.startswith("blocks."))
        why = r"\S+ is QuantizedTensor"
    patched = fast(loras.load_model(KIND, file), lora(0), strength)
    with refused(f"cannot be saved with the model: {why}"):
        saved(patched, output)
    assert not list(Path(output).rglob("*.safetensors"))
