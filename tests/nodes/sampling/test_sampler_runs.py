"""Wan Sampler (Fast): logs, errors and cleanup of a run, also when it fails."""

import re

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.lora.lora_models import (
    ROUNDING,
    lora,
    relative_error,
    save_lora,
    stack,
    weights,
)
from fast_video_vae.tests.nodes.sampling.sampler_models import (
    empty,
    expert,
    experts,
    prompts,
    run,
    samples,
    slow,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


@pytest.mark.parametrize("free_high", [False, True])
def test_a_run_does_not_change_the_models(free_high):
    both = experts()
    latent, texts = empty(), prompts()
    before = states(both)
    given = {"loras_high": stack(lora(0), 0.8), "free_high": free_high}
    first = samples(**given, latent_image=latent, **texts)
    assert states(both) == before
    assert not latent["samples"].any()
    assert list(latent) == ["samples"]
    assert torch.equal(samples(**given), first)


def test_the_first_model_is_unloaded_at_the_switch_on_request(monkeypatch):
    import comfy.model_management as management

    freed, unload = [], management.unload_model_and_clones

    def noted(model, *args, **kwargs):
        freed.append(model.model)
        return unload(model, *args, **kwargs)

    monkeypatch.setattr(management, "unload_model_and_clones", noted)
    for _ in range(2):
        samples(free_high=True)
        assert freed == [experts()["model_high"].model]
        samples(free_high=False)
        assert len(freed) == 1
        freed.clear()


def states(models):
    """Return the state of models: shared with clones, and possibly changed by a run."""
    return {
        name: (
            # The shift of a clone stays in the network while that is loaded.
            {key: value for key, value in weights(model).items() if "model_sampling" not in key},
            model.patches_uuid,
            list(model.patches),
            list(model.object_patches),
            repr(sorted(model.model_options)),
            repr(model.model_options["transformer_options"]),
            repr(model.wrappers),
            list(model.attachments),
            list(model.additional_models),
            model.hook_mode,
            model.get_model_object("model_sampling").shift,
        )
        for name, model in models.items()
    }


@pytest.mark.parametrize(("at", "count"), [(1, 1), (2, 2), slow(1, 2), slow(2, 1)])  # 2: switched
def test_a_run_out_of_memory_retries_the_step(monkeypatch, caplog, at, count):
    """In a model call: first unload other models, then stream the weights of this one."""
    import comfy.model_base
    import comfy.sampler_helpers

    given = {"loras_high": stack(lora(0), 0.8), "loras_low": stack(lora(0), 0.5)}
    expected = samples(**given)
    apply_model, calls = comfy.model_base.BaseModel._apply_model, iter(range(100))
    prepare, loads = comfy.sampler_helpers.prepare_sampling, []

    def scarce(self, *args, **kwargs):
        if at <= next(calls) < at + count:
            raise torch.cuda.OutOfMemoryError("no memory is left")
        return apply_model(self, *args, **kwargs)

    def noted(*args, **kwargs):
        loads.append(kwargs.get("force_offload", False))
        return prepare(*args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "_apply_model", scarce)
    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", noted)
    result = samples(**given)
    assert relative_error(result, expected) < ROUNDING
    assert sum(loads) == count - 1
    warned = [record.message for record in caplog.records if "memory ran out" in record.message]
    assert len(warned) == count
    assert all("high noise" in text if at == 1 else "low noise" in text for text in warned)


def test_both_models_get_the_noise_levels_of_each_call():
    from comfy.patcher_extension import WrappersMP

    seen = []

    def wrapper(executor, *args, **kwargs):
        options = args[5] if len(args) > 5 else kwargs["transformer_options"]
        seen.append((len(options["sample_sigmas"]), options["fast_video_vae.phase"].number))
        return executor(*args, **kwargs)

    models = {name: model.clone() for name, model in experts().items()}
    for model in models.values():
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)
    samples(**models)
    assert seen == [(5, 0), (5, 0), (5, 1), (5, 1)]


def test_the_report_lists_steps_and_loras():
    lines = run(cfg_high="3.5,1")["report"].splitlines()
    assert lines == [
        "euler, 4 steps",
        "high noise: steps 1-2, noise level 1.0000 to 0.8333, CFG 3.5, 1",
        "low noise: steps 3-4, noise level 0.8333 to 0.0000, CFG 1",
    ]


def test_the_timing_has_both_experts_and_the_switch():
    text = run()["timing"]
    for part in ("denoise", "high noise", "low noise", "switch", "load"):
        assert part in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boundary": "1.5"}, "boundary: got '1.5'"),
        ({"boundary": "-0.1"}, "boundary: got '-0.1'"),
        ({"boundary": "-1"}, "boundary: got '-1'"),
        ({"boundary": "early"}, "boundary: got 'early'"),
        ({"boundary": "nan"}, "boundary: got 'nan'"),
        ({"cfg_high": "3.5;1"}, "cfg_high: got '3.5;1'; expected a number"),
        ({"cfg_low": "1,,2"}, "cfg_low: got '1,,2'; expected a number"),
        ({"cfg_high": "1,2,3"}, "cfg_high: 3 values; expected 1, 2 for its steps or 4"),
        ({"cfg_low": "1,2,3,4,5"}, "cfg_low: 5 values; expected 1, 2 for its steps or 4"),
        ({"shift_high": "5,5,5"}, "shift_high: 3 values; expected 1 or 4"),
        ({"shift_high": "1,2,3,900"}, "shift_high: step 3 starts at noise level 0.9967; expected"),
        ({"shift_high": "0"}, "shift_high: got 0; expected a shift above 0"),
        ({"shift_low": "-3"}, "shift_low: got -3; expected a shift above 0"),
        ({"shift_low": "90"}, "shift_low: step 2 starts at noise level 0.9890, not below"),
        ({"shift_low": "8"}, "shift_low: step 2 starts at noise level 0.8889, not below the bound"),
        ({"negative": None, "cfg_low": "2"}, "negative: not connected, but CFG 2 needs it"),
        ({"positive": []}, "positive: the conditioning is empty"),
        ({"sigmas": torch.tensor([0.1, 0.9])}, "sigmas: the noise levels do not fall"),
        ({"latent_image": {"samples": torch.ones(1, 48, 3, 8, 8)}}, "latent_image: got 48 chan"),
        ({"model_low": lambda: expert("wan22-5b")}, "model_low: its latents have 48 channels; exp"),
        ({"model_low": None, "loras_low": lambda: stack(lora(0))}, "loras_low: there is no model"),
        ({"loras_high": lambda: stack(lora(0), "0;1;0")},
         "loras_high: strength '0;1;0' has 3 phases, but the run"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_refused_before_anything_is_loaded(monkeypatch, given, message):
    import comfy.sampler_helpers

    given = {name: value() if callable(value) else value for name, value in given.items()}

    def loads(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", loads)
    with refused(f"^{re.escape(message)}"):
        run(**given)


def test_a_lora_for_another_model_is_refused():
    pair = {"lora_A": torch.ones(4, 8), "lora_B": torch.ones(8, 4)}
    pair = {f"some.where.{name}.weight": tensor for name, tensor in pair.items()}
    other = save_lora(pair, "other.safetensors")
    for name in ("loras_high", "loras_low"):
        with refused(f"^{name}: .*other.safetensors"):
            run(**{name: stack(other)})
