"""Wan Sampler (Fast): logs, errors and cleanup of a run, with wrappers of other packs around it.

Such a wrapper, as of ComfyUI's EasyCache, restores options of its own model in its `finally`.
"""

import itertools
import logging
import operator
import re

import pytest
import torch

from fast_video_vae.kernels import errors as log
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.lora.lora_models import (
    ROUNDING,
    fast,
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
    in_two,
    run,
    samples,
    shifted,
)
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


def states(models):
    """Return the state of models: shared with clones, and possibly changed by a run."""
    return {
        name: (
            # The shift of a clone stays in the network while that is loaded.
            {key: value for key, value in weights(model).items() if "model_sampling" not in key},
            (model.patches_uuid, [*model.patches], [*model.object_patches], [*model.attachments]),
            repr(sorted(model.model_options)),
            repr(options := model.model_options["transformer_options"]),
            repr([vars(one) for name, one in options.items() if name == "easycache"]),
            (repr(model.wrappers), [*model.additional_models], model.hook_mode),
            model.get_model_object("model_sampling").shift,
        )
        for name, model in models.items()
    }


def test_a_run_does_not_change_its_inputs_and_reports_its_steps(monkeypatch):
    import comfy.model_management as management

    freed, unload = [], management.unload_model_and_clones
    monkeypatch.setattr(
        management, "unload_model_and_clones", lambda one: (freed.append(one.model), unload(one))
    )
    both, latent = experts(), empty() | {"downscale_ratio_spacial": 8}
    before = states(both)
    given = {"loras_high": stack(lora(0), 0.8), "cfg_high": "3.5,1"}
    first = run(**given, latent_image=latent)
    assert not freed
    assert states(both) == before
    assert list(latent) == ["samples", "downscale_ratio_spacial"]
    assert list(first["LATENT"]) == list(first["denoised"]) == ["samples"]  # it is not empty
    assert not latent["samples"].any()
    assert torch.equal(samples(**given, free_high=True), first["LATENT"]["samples"])
    assert freed == [both["model_high"].model]
    assert states(both) == before
    assert first["report"].splitlines()[:3] == [
        "euler, 4 steps",
        "high noise: steps 1-2, noise level 1.0000 to 0.8333, CFG 3.5, 1",
        "low noise: steps 3-4, noise level 0.8333 to 0.0000, CFG 1",
    ]


@pytest.mark.parametrize(("at", "count"), [(1, 1), (2, 2)])  # 2: switched
def test_a_run_out_of_memory_retries_the_step(monkeypatch, caplog, at, count):
    """In a model call: first unload other models, then stream the weights of this one."""
    from comfy import sampler_helpers
    from comfy.model_base import BaseModel

    expected, calls, loads = samples(), itertools.count(), []
    apply_model, prepare = BaseModel._apply_model, sampler_helpers.prepare_sampling

    def scarce(self, *args, **kwargs):
        if at <= next(calls) < at + count:
            raise torch.cuda.OutOfMemoryError("no memory is left")
        return apply_model(self, *args, **kwargs)

    def noted(*args, **kwargs):
        loads.append(kwargs.get("force_offload", False))
        return prepare(*args, **kwargs)

    monkeypatch.setattr(BaseModel, "_apply_model", scarce)
    monkeypatch.setattr(sampler_helpers, "prepare_sampling", noted)
    assert relative_error(samples(), expected) < ROUNDING
    assert sum(loads) == count - 1
    assert caplog.text.count(f"ran out in a step of {['high', 'low'][at - 1]} noise") == count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boundary": "1.5"}, "boundary: got '1.5'"),
        ({"cfg_high": "1,2,3"}, "cfg_high: 3 values; expected 1, 2 for its steps or 4"),
        ({"shift_high": "5,5,5"}, "shift_high: 3 values; expected 1 or 4"),
        ({"shift_high": "1,2,3,900"}, "shift_high: step 3 starts at noise level 0.9967; expected"),
        ({"shift_low": "8"}, "shift_low: step 2 starts at noise level 0.8889, not below the bound"),
        ({"negative": None, "cfg_low": "2"}, "negative: not connected, but CFG 2 needs it"),
        ({"positive": []}, "positive: the conditioning is empty"),
        ({"sigmas": torch.tensor([0.1, 0.9])}, "sigmas: the noise levels do not fall"),
        ({"latent_image": {"samples": torch.ones(1, 48, 3, 8, 8)}}, "latent_image: got 48 chan"),
        ({"model_low": lambda: expert("wan22-5b")}, "model_low: its latents have 48 channels; exp"),
        ({"model_low": None, "loras_low": lambda: stack(lora(0))}, "loras_low: there is no model"),
        ({"loras_high": lambda: stack(lora(0), "0;1;0")}, "loras_high: strength '0;1;0' has 3 ph"),
        ({"model_low": lambda: fast(expert("wan21-t2v", 1), lora(0), "0;1;0")}, "model_low: stren"),
        ({"loras_low": lambda: stack(other_lora())}, "loras_low: "),
    ],
)
def test_invalid_inputs_are_refused_before_anything_is_loaded(monkeypatch, given, message):
    import comfy.sampler_helpers

    given = {name: value() if callable(value) else value for name, value in given.items()}
    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", pytest.fail)
    with refused(f"^{re.escape(message)}"):
        run(**given)


def other_lora():
    """A file of another model."""
    pair = {"lora_A": torch.ones(4, 8), "lora_B": torch.ones(8, 4)}
    pair = {f"some.where.{name}.weight": tensor for name, tensor in pair.items()}
    return save_lora(pair, "other.safetensors")


@pytest.mark.parametrize(
    ("kind", "channels", "size", "fits"),
    [
        ("wan22-5b", 48, (5, 3), "height 64 or 96, width 32 or 64"),
        ("qwen-image", 16, (5, 6), "height 32 or 48"),  # whose patch is one number
    ],
)
def test_a_size_that_the_model_cuts_is_logged_once(monkeypatch, caplog, kind, channels, size, fits):
    monkeypatch.setattr(log, "_logged", set())
    latent = {"samples": torch.zeros(1, channels, 1 if kind == "qwen-image" else 3, *size)}
    given = {"model_low": None, "shift_high": "auto", "latent_image": latent, "steps": 2}
    for seed in (1, 2):
        assert samples(kind, **given, seed=seed).shape == latent["samples"].shape
        line = (
            f"Fast Video VAE: the latent has {size[0]} rows and {size[1]} columns; this model "
            "needs even numbers, so ComfyUI repeats the opposite edge, which can show. In pixels: "
        )
        assert [text for text in caplog.messages if " rows and " in text] == [line + fits]


# Four steps of each expert: a cache needs two before it skips one.
STEPS, AT = 8, 4


def watched(model, name, seen):
    """A model with a wrapper of a run that notes what it finds before and after the run."""
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor, *args, **kwargs):
        guider = executor.class_obj
        found = guider.model_patcher, guider.model_options, guider.conds
        seen.append((name, "begins", found[0].model is model.model))
        try:
            return executor(*args, **kwargs)
        finally:
            after = guider.model_patcher, guider.model_options, guider.conds
            seen.append((name, "ends", all(map(operator.is_, found, after))))

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, name, wrapper)
    return clone


def cached(model, name, seen):
    """A model between two watching wrappers, with a LoRA and a cache that skips what it may."""
    given = {"reuse_threshold": 1000.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    model = watched(fast(model, lora(0), 0.8), f"around {name}", seen)
    (model,) = v3_node("nodes_easycache", "EasyCacheNode", model=model, **given)
    return watched(model, f"inside {name}", seen)


def pair(seen):
    models = zip(("high", "low"), experts().values(), strict=True)
    return {f"model_{name}": cached(model, name, seen) for name, model in models}


ORDER = [f"{place} {name}" for name in ("high", "low") for place in ("around", "inside")]
SEEN = [(name, "begins", True) for name in ORDER]
SEEN += [(name, "ends", True) for name in reversed(ORDER)]


def test_wrappers_find_the_options_of_their_own_model(caplog):
    """As in two runs of ComfyUI's sampler, of which the results and skipped steps are equal."""
    caplog.set_level(logging.INFO)

    def skipped():  # the numbers of steps that caches log at the end of a run
        texts = [text for text in caplog.messages if "skipped" in text]
        caplog.clear()
        return sorted(text.split("skipped ")[1].split("/")[0] for text in texts)

    high, low = (shifted(model, 5.0) for model in pair([]).values())
    expected, saved, seen = in_two(high, low, at=AT, steps=STEPS), skipped(), []
    assert len(saved) == 2
    result = samples(**pair(seen), steps=STEPS)
    assert seen == SEEN
    assert skipped() == saved
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize(("place", "at"), [("call", 1), ("call", STEPS), ("load", 2)])
def test_an_error_anywhere_is_raised_as_it_is(monkeypatch, place, at):
    """In a call of either expert, or in the load at the switch; after it, all is as before."""
    from comfy import sampler_helpers
    from comfy.model_base import BaseModel

    is_call = place == "call"
    owner, name = (BaseModel, "_apply_model") if is_call else (sampler_helpers, "prepare_sampling")
    seen, calls, original, error = [], itertools.count(1), getattr(owner, name), KeyError("a")
    models = pair(seen)
    expected, before = samples(**models, steps=STEPS), states(models)
    seen.clear()

    def failing(*args, **kwargs):
        if next(calls) == at:
            raise error
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(KeyError) as caught:
            samples(**models, steps=STEPS)
    assert caught.value is error
    begun = [each for each, event, _ in seen if event == "begins"]
    assert seen[len(begun) :] == [(each, "ends", True) for each in reversed(begun)]
    assert states(models) == before
    assert all(model.model.current_patcher is None for model in experts().values())
    assert torch.equal(samples(**models, steps=STEPS), expected)
