"""LoRAs on whole models against ComfyUI's loader and a formula; the reports; saved models."""

import functools
import logging
import random
import re
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes import diffusion
from fast_video_vae.tests.nodes.diffusion import KIND, sample
from fast_video_vae.tests.nodes.lora import lora_models as loras
from fast_video_vae.tests.nodes.lora.lora_models import apply, core, fast, lora, stack
from fast_video_vae.tests.nodes.sampling.sampler_models import advanced, empty, ksampler, prompts
from fast_video_vae.tests.nodes.vae.pairs import relative_error, v3_node

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


@pytest.mark.parametrize(("kind", "mode"), [*zip(diffusion.KINDS, loras.MODES * 2, strict=False)])
def test_a_run_of_every_kind_equals_that_of_comfyuis_loader(kind, mode):
    model, _, without = plain(kind)
    expected = sample(core(model, lora(0, kind), 0.8), kind)
    assert relative_error(expected, without) > loras.EFFECT
    result = sample(fast(model, lora(0, kind), 0.8, mode), kind)
    assert relative_error(result, expected) < loras.ROUNDING
    assert torch.equal(sample(model, kind), without)


def deltas(seed, parts):
    """What a LoRA adds to each weight, by its formula."""
    state = plain()[1]
    file = loras.lora_for(state, seed=seed, parts=parts)
    for key, value in state.items():
        name, _, leaf = f"diffusion_model.{key}".rpartition(".")
        if f"{name}.alpha" in file and leaf == "weight":
            up, down = (file[f"{name}.lora_{part}.weight"].flatten(1) for part in ("up", "down"))
            yield key, (up @ down).view_as(value) * file[f"{name}.alpha"] / len(down)
            continue
        end = {"weight": "diff", "bias": "diff_b"}.get(leaf, f"{leaf}.diff")
        if f"{name}.{end}" in file:
            yield key, file[f"{name}.{end}"]


# Strengths and what they are for the expert of low noise; block filters and their factors.
STRENGTHS = {"0.8": 0.8, "-1": -1.0, "3.5": 3.5, "3;-0.5": -0.5, "0": 0.0}
BLOCKS = {
    "": lambda key: 1.0,
    "1=0.5": lambda key: 0.5 * key.startswith("blocks.1."),
    "!self_attn": lambda key: float("self_attn" not in key),
}


def test_a_chain_of_loaders_equals_the_sum_of_deltas():
    """Our nodes in any mode, and ComfyUI's loaders; the model that each node gets is unchanged.

    ComfyUI's bypass loader adds to the output of linear layers, and patches their biases.
    """
    from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly

    rng, (model, state, without) = random.Random(0), plain()
    bypass = LoraLoaderBypassModelOnly().load_lora_model_only
    theirs = {"core": core, "core's bypass": lambda *given: bypass(*given)[0]}
    ways, chain, results = rng.sample([*loras.MODES, *theirs], 5), [(model, state)], []
    for way in ways:
        model, values = chain[-1]
        values, given, file = dict(values), None, rng.randrange(3)
        parts = loras.COMMON if way in theirs else loras.ALL
        name = lora(file, parts=parts)
        for _ in range(1 if way in theirs else 2):  # the same file twice
            strength, blocks = rng.choice([*STRENGTHS]), rng.choice([*BLOCKS])
            given = stack(name, strength, blocks, given)
            for key, delta in deltas(file, parts):
                factor = 0.8 if way in theirs else STRENGTHS[strength] * BLOCKS[blocks](key)
                values[key] = values[key] + factor * delta
        if way in theirs:
            chain.append((theirs[way](model, name, 0.8), values))
        else:
            chain.append((apply(model, given, way, "low")[0], values))
    for model, values in rng.sample(chain, len(chain)):
        results.append(sample(diffusion.load_model(KIND, values)))
        assert relative_error(sample(model), results[-1]) < loras.ROUNDING, ways
    assert torch.equal(sample(plain()[0]), without)


@pytest.mark.parametrize(
    ("mode", "variable", "chosen"),
    [
        ("auto", "", "auto"),
        ("auto", "WAN_LORA_STREAMING", "stream"),
        ("auto", "WAN_LORA_ONTHEFLY", "bypass"),
        ("stream", "WAN_LORA_ONTHEFLY", "stream"),
    ],
)
def test_the_mode_or_for_auto_the_environment_chooses_the_method(
    mode, variable, chosen, monkeypatch, caplog
):
    """As the report says; and the log has counts and times of a run, if they are asked for."""
    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.host import timing

    monkeypatch.setenv(variable or "WAN_LORA_STREAMING", str(len(variable)))
    model, report = apply(plain("wan21-i2v")[0], stack(lora(0, "wan21-i2v"), 0.8), mode)
    assert report.endswith(f", {chosen}")
    caplog.set_level(logging.INFO)
    with CurrentNodeContext(mode + variable, "1"):
        for asked in ("1", "0", "1"):
            monkeypatch.setenv("WAN_LORA_TIMING", asked)
            sample(model, "wan21-i2v")
        assert ("LoRA  bypass" in timing.text()) == (chosen != "stream")
    lines = re.findall(r"LoRA: stream (\d+), bypass (\d+), .* held [\d.]+ MiB\n", caplog.text)
    # The patch embedding, a convolution, once a step. In auto also the layers that have the 257
    # tokens of an image, which are more than 128 x 128 numbers are worth.
    (stream, bypass), again = lines
    assert again == (stream, bypass)
    assert (stream == "2") == (chosen == "bypass")
    assert (bypass == "0") == (chosen == "stream")


@pytest.mark.parametrize(
    ("mode", "phase", "strength", "steps"),
    [
        ("auto", "low", "1;0.9,0,-0.4", (0.9, 0.0, -0.4)),
        ("stream", "auto", "0.8;3@sigma:0.98-0.1", (0.0, 0.8, 0.8)),
    ],
)
def test_a_schedule_has_a_strength_for_each_step(mode, phase, strength, steps):
    """The run of three steps is those steps taken one by one, with loaders of ComfyUI's."""
    model, latent = plain()[0], empty()
    known = {"known": prompts(), "steps": 3, "cfg": 4.0, "sampler": "euler"}
    for start, value in enumerate(steps):
        one, first = core(model, lora(0), value), "enable" if start == 0 else "disable"
        end = start + 1 if start < 2 else 10000
        with torch.inference_mode():
            latent = advanced(first, model=one, latent=latent, start=start, end=end, **known)
    patched = apply(model, stack(lora(0), strength), mode, phase)[0]
    result = ksampler(patched, cfg=4.0, steps=3)
    assert relative_error(result, latent["samples"]) < loras.ROUNDING


@pytest.mark.parametrize(("mode", "second"), [("auto", True), ("bypass", False)])
def test_a_guider_of_two_models_applies_the_loras_of_each(mode, second, inference):
    """It calls the second model with the options of the first; their LoRAs differ."""
    import comfy.samplers

    noise, positive, negative = diffusion.inputs(KIND)
    base, known = [diffusion.load_model(KIND, plain()[1]) for _ in range(2)], {"cfg": 4.0}
    euler, sampling = comfy.samplers.sampler_object("euler"), base[0].model.model_sampling
    known |= {"positive": positive, "negative": negative}
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 2)

    def both(apply):
        other = apply(base[1], lora(1), 0.6) if second else base[1]
        return {"model": apply(base[0], lora(0), 0.8), "model_negative": other}

    def run(models):
        (guider,) = v3_node("nodes_custom_sampler", "DualModelGuider", **models, **known)
        return guider.sample(noise, 0 * noise, euler, sigmas, disable_pbar=True, seed=1)

    expected, models = run(both(core)), both(functools.partial(fast, mode=mode))
    for _ in range(2):
        assert relative_error(run(models), expected) < loras.ROUNDING
    alone = sample(core(base[0], lora(0), 0.8))
    assert relative_error(expected, alone) > loras.EFFECT
    assert relative_error(sample(models["model"]), alone) < loras.ROUNDING


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "strength", "is_weak"),
    [
        (BF16, "1", True),
        ("int8", "1", True),
        (torch.float32, "1", False),
        (BF16, "1,100", False),  # the largest strength of a run counts
    ],
)
def test_auto_bypasses_weak_loras_and_reports_name_them(dtype, strength, is_weak):
    """For deltas of a thousandth of the weights; bypass keeps them all."""
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
    tensors = loras.lora_for(linear, parts=("pairs",), amount=0.001)
    name = loras.save_lora(tensors, "weak.safetensors")
    packed = diffusion.quantised_layers(model)
    for mode in loras.UNMERGED if packed or "," in strength else loras.MODES:
        patched, report = apply(model, stack(name, strength), mode)
        assert ("\nsmall deltas: " in report) == (is_weak and mode != "bypass")
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
    before = loras.bits(model)
    for each in (second, second.clone(), none, theirs):
        expected = sample(each)
        assert relative_error(sample(saved(each, output)), expected) < loras.ROUNDING
        assert loras.bits(model) == before or each is theirs
        assert torch.equal(sample(each), expected)


@pytest.mark.parametrize("strength", ["0.9,0.8", "1;0.3", "1"])
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
