"""LoRAs on whole models against ComfyUI's loader; the reports of weak ones; saved models."""

import functools
import logging
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import apply, core, fast, lora, stack
from fast_video_vae.tests.nodes.sampling.sampler_models import advanced, empty, ksampler, prompts
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
    state = diffusion.random_weights(kind)
    model = diffusion.load_model(kind, state)
    return model, state, sample(model, kind)


@each_value_once(kind=diffusion.KINDS, mode=loras.MODES)
def test_a_run_of_every_kind_equals_that_of_comfyuis_loader(kind, mode):
    model, _, without = plain(kind)
    expected = sample(core(model, lora(0, kind), 0.8), kind)
    assert relative_error(expected, without) > loras.EFFECT
    result = sample(fast(model, lora(0, kind), 0.8, mode), kind)
    assert relative_error(result, expected) < loras.ROUNDING
    assert torch.equal(sample(model, kind), without)


@pytest.mark.parametrize("mode", loras.MODES)
def test_stacks_of_two_nodes_between_other_loaders_equal_comfyuis_loaders(mode):
    """Large and negative strengths, one block, a phase, a file twice, and modulations.

    ComfyUI's loader accepts `modulation.diff` without effect, so the test edits these weights. Its
    bypass loader adds to the output of linear layers, and patches their biases.
    """
    from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly

    model, state, without = plain()
    tables, whole = loras.lora_for(state, parts=("modulations",)), loras.lora_for(state, seed=1)
    block = {key: value for key, value in whole.items() if "blocks.1." in key}
    edited = {
        key: value + 0.8 * tables.get(f"diffusion_model.{key}.diff", torch.tensor(0.0))
        for key, value in state.items()
    }
    models = [diffusion.load_model(KIND, edited)]
    block = loras.save_lora(block, "block.safetensors")
    theirs = (lora(2), 0.5), (lora(3), 0.6)
    for name, strength in (*theirs, (lora(0), 3.5), (block, -0.5), (lora(0), -1.0)):
        models.append(core(models[-1], name, strength))
    results = [*map(sample, models)]
    assert min(map(relative_error, results, [without, *results])) > loras.EFFECT
    first = stack(loras.save_lora(tables, "tables.safetensors"), 0.8)
    first = stack(lora(1), -1, "1=0.5", before=stack(lora(0), 3.5, before=first))
    second = stack(lora(0), "3;-1")
    patched, report = apply(apply(core(model, *theirs[0]), first, mode)[0], second, mode, "low")
    (patched,) = LoraLoaderBypassModelOnly().load_lora_model_only(patched, *theirs[1])
    assert relative_error(sample(patched), results[-1]) < loras.ROUNDING
    assert mode == "merged" or f"{lora(0)} is used 2 times; the strengths add up" in report
    assert torch.equal(sample(model), without)


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
def test_the_mode_or_for_auto_the_environment_chooses_the_method(
    mode, variable, expected, monkeypatch, caplog
):
    """As the table of a run counts, if it is asked for."""
    for name in ("WAN_LORA_STREAMING", "WAN_LORA_ONTHEFLY"):
        monkeypatch.setenv(name, str(int(name == variable)))
    kind, tables = "wan21-i2v", []
    model = fast(plain(kind)[0], lora(0, kind), 0.8, mode)
    for asked in ("1", "1", "0"):
        monkeypatch.setenv("WAN_LORA_TIMING", asked)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            sample(model, kind)
        tables.append([text for text in caplog.messages if "LoRA in a run of" in text])
    (table,), (again,), none = tables
    assert not none
    rows = [row.split() for row in table.split("\n")[1:]]
    assert [row[0] for row in rows] == ["stream", "bypass", "formula", "held"]
    stream, bypass, _, _ = (float(row[1]) for row in rows)
    # The patch embedding, a convolution, once a step. In auto also the layers that have the 257
    # tokens of an image, which are more than 128 x 128 numbers are worth.
    assert (stream == 2) == (expected == "bypass")
    assert (bypass == 0) == (expected == "stream")
    assert sum(float(row[3]) for row in rows[:2]) > 0
    assert [row.split()[1] for row in again.split("\n")[1:]] == [row[1] for row in rows]
    assert not loras.session_of(model).counts.unserved


@pytest.mark.parametrize(
    ("mode", "strength", "steps"),
    [
        ("auto", "1;0.9,0,-0.4", (0.9, 0.0, -0.4)),
        ("bypass", "0.8,0.5@0.3-0.6", (0.0, 0.8, 0.0)),  # from 1/3 to 2/3
        ("stream", "0.8@sigma:0.98-0.1", (0.0, 0.8, 0.8)),
    ],
)
def test_a_schedule_has_a_strength_for_each_step(mode, strength, steps):
    """The run of three steps is those steps taken one by one, with loaders of ComfyUI's."""
    model, latent = plain()[0], empty()
    known = {"known": prompts(), "steps": 3, "cfg": 4.0, "sampler": "euler"}
    for start, value in enumerate(steps):
        one, first = core(model, lora(0), value), "enable" if start == 0 else "disable"
        end = start + 1 if start < 2 else 10000
        with torch.inference_mode():
            latent = advanced(first, model=one, latent=latent, start=start, end=end, **known)
    patched = apply(model, stack(lora(0), strength), mode, "low")[0]
    result = ksampler(patched, cfg=4.0, steps=3)
    assert relative_error(result, latent["samples"]) < loras.ROUNDING


@torch.inference_mode()
def dual(one, other):
    """A run of ComfyUI's guider of two models."""
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    noise, positive, negative = diffusion.inputs(KIND)
    (guider,) = DualModelGuider.execute(one, positive, 4.0, other, negative).args
    sampling = one.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 2)
    euler = comfy.samplers.sampler_object("euler")
    return guider.sample(noise, torch.zeros_like(noise), euler, sigmas, disable_pbar=True, seed=1)


@each_value_once(mode=loras.UNMERGED, second=["another", "none", "the same"])
def test_a_guider_of_two_models_applies_the_loras_of_each(mode, second):
    """It calls the second model with the options of the first; their LoRAs differ."""

    def pair(apply):
        one, other = (diffusion.load_model(KIND, plain()[1]) for _ in range(2))
        one = apply(one, lora(0), 0.8)
        return one, {"another": apply(other, lora(1), 0.6), "none": other, "the same": one}[second]

    expected, models = dual(*pair(core)), pair(functools.partial(fast, mode=mode))
    for _ in range(2):
        assert relative_error(dual(*models), expected) < loras.ROUNDING
    alone = sample(core(plain()[0], lora(0), 0.8))
    assert second == "the same" or relative_error(expected, alone) > loras.EFFECT
    assert relative_error(sample(models[0]), alone) < loras.ROUNDING


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "amount", "strength", "blocks", "is_weak"),
    [
        (BF16, 0.001, "1", "", True),
        (FP8, 0.001, "1", "", True),
        ("int8", 0.001, "1", "", True),
        ("int8", 0.1, "1", "", False),
        (BF16, 0.1, "1", "", False),
        (torch.float32, 0.001, "1", "", False),
        # The largest strength of a run counts.
        (BF16, 0.001, "1,100", "", False),
        (BF16, 0.001, "1", "0=100", False),
    ],
)
def test_auto_bypasses_weak_loras_and_reports_name_them(dtype, amount, strength, blocks, is_weak):
    """For deltas of an `amount` of the weights; bypass keeps them all."""
    kind, compute = "wan21-i2v", torch.float32 if dtype == torch.float32 else BF16
    state = plain(kind)[1]
    file = {key: value.to(compute) for key, value in state.items()}
    if dtype == "int8":
        form, dtype = {"format": "int8_tensorwise"}, BF16
        file = diffusion.quantised(file, form, lambda key: key.startswith("blocks."))
    with torch.inference_mode():
        model = diffusion.load_model(kind, file, dtype=dtype)
    model.model.manual_cast_dtype = compute  # as on a GPU
    linear = {key: value for key, value in state.items() if key.startswith("blocks.")}
    tensors = loras.lora_for(linear, parts=("pairs",), amount=amount)
    name = loras.save_lora(tensors, f"weak-{amount}.safetensors")
    packed = dtype == FP8 or diffusion.quantised_layers(model)
    for mode in loras.UNMERGED if packed or "," in strength else loras.MODES:
        patched, report = apply(model, stack(name, strength, blocks), mode)
        said = [line for line in report.splitlines() if line.startswith("small deltas")]
        assert len(said) == (is_weak and mode != "bypass")
        if mode == "auto":
            sample(patched, kind)
            counts = loras.session_of(patched).counts
            # Strong ones are added to the weights of the layers for the tokens of the image.
            assert packed or (counts.stream == 0) == is_weak
            assert counts.bypass > 0


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
    """Of all nodes before, also of other packs, in their phase; the model is unchanged."""
    model = diffusion.load_model(KIND)
    theirs = core(model, lora(2), 0.5)
    first = fast(theirs, lora(0, parts=loras.ALL), 0.8)
    second = apply(first, stack(lora(1), "1;-0.5"), phase="low")[0]
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


@pytest.mark.parametrize("strength", ["0.9,0.8", "1@0-0.5", "1;0.3", "1"])
def test_what_cannot_be_merged_is_refused_and_not_saved(strength, inference, output):
    """A strength that changes during a run, and with a constant one a quantised weight."""
    merged = saving = f"strength {strength} changes during a run"
    file = diffusion.random_weights(KIND)
    if strength == "1":
        file = diffusion.quantised(file, diffusion.FP8, lambda key: key.startswith("blocks."))
        merged, saving = r"\S+ is QuantizedTensor; merged needs", r"\S+ is QuantizedTensor"
    model = diffusion.load_model(KIND, file)
    if ";" not in strength:  # which is one number for the phase of the node
        with pytest.raises(ValueError, match=f"^stack: {merged}"):
            fast(model, lora(0), strength, "merged")
    with refused(f"cannot be saved with the model: {saving}"):
        saved(fast(model, lora(0), strength), output)
    assert not list(Path(output).rglob("*.safetensors"))
