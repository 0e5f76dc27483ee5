"""Wan Sampler (Fast): logs, errors and cleanup of a run, with wrappers of other packs around it.

A wrapper of a run, such as that of ComfyUI's EasyCache, changes the guider's options and restores
them in its `finally`: there it must find those of its own model, and no error of it may replace the
error that stopped the run.
"""

import logging
import operator
import re

import pytest
import torch

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
    prompts,
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
            repr(model.model_options["transformer_options"]),
            (repr(model.wrappers), [*model.additional_models], model.hook_mode),
            model.get_model_object("model_sampling").shift,
        )
        for name, model in models.items()
    }


@pytest.mark.parametrize("free_high", [False, True])
def test_a_run_does_not_change_its_inputs(monkeypatch, free_high):
    import comfy.model_management as management

    freed, unload = [], management.unload_model_and_clones

    def noted(model, *args, **kwargs):
        freed.append(model.model)
        return unload(model, *args, **kwargs)

    monkeypatch.setattr(management, "unload_model_and_clones", noted)
    both, latent, texts = experts(), empty(), prompts()
    before = states(both)
    given = {"loras_high": stack(lora(0), 0.8), "free_high": free_high}
    first = samples(**given, latent_image=latent, **texts)
    assert states(both) == before
    assert not latent["samples"].any()
    assert list(latent) == ["samples"]
    assert torch.equal(samples(**given), first)
    assert freed == ([both["model_high"].model] * 2 if free_high else [])


@pytest.mark.parametrize(("at", "count"), [(1, 1), (2, 2)])  # 2: switched
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
    assert relative_error(samples(**given), expected) < ROUNDING
    assert sum(loads) == count - 1
    warned = [record.message for record in caplog.records if "memory ran out" in record.message]
    assert len(warned) == count
    assert all(("high noise" if at == 1 else "low noise") in text for text in warned)


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


def test_the_report_lists_the_steps_and_the_timing_both_experts():
    result = run(cfg_high="3.5,1")
    assert result["report"].splitlines() == [
        "euler, 4 steps",
        "high noise: steps 1-2, noise level 1.0000 to 0.8333, CFG 3.5, 1",
        "low noise: steps 3-4, noise level 0.8333 to 0.0000, CFG 1",
    ]
    for part in ("denoise", "high noise", "low noise", "switch", "load"):
        assert part in result["timing"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boundary": "1.5"}, "boundary: got '1.5'"),
        ({"boundary": "-1"}, "boundary: got '-1'"),
        ({"cfg_high": "3.5;1"}, "cfg_high: got '3.5;1'; expected a number"),
        ({"cfg_high": "1,2,3"}, "cfg_high: 3 values; expected 1, 2 for its steps or 4"),
        ({"cfg_low": "1,2,3,4,5"}, "cfg_low: 5 values; expected 1, 2 for its steps or 4"),
        ({"shift_high": "5,5,5"}, "shift_high: 3 values; expected 1 or 4"),
        ({"shift_high": "1,2,3,900"}, "shift_high: step 3 starts at noise level 0.9967; expected"),
        ({"shift_high": "0"}, "shift_high: got 0; expected a shift above 0"),
        ({"shift_low": "90"}, "shift_low: step 2 starts at noise level 0.9890, not below"),
        ({"shift_low": "8"}, "shift_low: step 2 starts at noise level 0.8889, not below the bound"),
        ({"negative": None, "cfg_low": "2"}, "negative: not connected, but CFG 2 needs it"),
        ({"positive": []}, "positive: the conditioning is empty"),
        ({"sigmas": torch.tensor([0.1, 0.9])}, "sigmas: the noise levels do not fall"),
        ({"latent_image": {"samples": torch.ones(1, 48, 3, 8, 8)}}, "latent_image: got 48 chan"),
        ({"model_low": lambda: expert("wan22-5b")}, "model_low: its latents have 48 channels; exp"),
        ({"model_low": None, "loras_low": lambda: stack(lora(0))}, "loras_low: there is no model"),
        (
            {"loras_high": lambda: stack(lora(0), "0;1;0")},
            "loras_high: strength '0;1;0' has 3 phases, but the run",
        ),
        (
            {"model_low": lambda: fast(expert("wan21-t2v", 1), lora(0), "0;1;0")},
            "model_low: strength '0;1;0' has 3 phases, but the run",
        ),
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
        ("wan21-t2v", 16, (8, 6), None),
        ("wan21-t2v", 16, (7, 6), "height 48 or 64"),
        ("wan22-5b", 48, (5, 3), "height 64 or 96, width 32 or 64"),
        ("qwen-image", 16, (5, 6), "height 32 or 48"),  # whose patch is one number
    ],
)
def test_a_size_that_the_model_cuts_is_logged_once(size_lines, kind, channels, size, fits):
    latent = {"samples": torch.zeros(1, channels, 1 if kind == "qwen-image" else 3, *size)}
    low = expert(kind, 1) if kind == "wan21-t2v" else None
    for seed in (1, 2):
        given = {"model_high": expert(kind), "model_low": low, "shift_high": "auto"}
        result = run(kind, **given, latent_image=latent, seed=seed, steps=2)
        assert result["LATENT"]["samples"].shape == latent["samples"].shape
        line = (
            f"Fast Video VAE: the latent has {size[0]} rows and {size[1]} columns; this model "
            "needs even numbers, so ComfyUI repeats the opposite edge, which can show. In pixels: "
        )
        assert size_lines() == ([line + fits] if fits else [])


# Four steps of each expert: a cache needs two before it skips one.
STEPS, AT = 8, 4
BOTH = ("high", "low")


def cached(model, cache):
    """A model with a cache that skips every step that it may."""
    given = {"reuse_threshold": 1000.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    return v3_node("nodes_easycache", f"{cache}Node", model=model, **given)[0]


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


def pair(cache, where, seen):
    """Both experts with LoRAs, and caches on some of them between two watching wrappers."""
    models = {}
    for (key, model), name in zip(experts().items(), BOTH, strict=True):
        patched = watched(fast(model, lora(0), 0.8), f"around {name}", seen)
        patched = cached(patched, cache) if name in where else patched
        models[key] = watched(patched, f"inside {name}", seen)
    return models


ORDER = [f"{place} {name}" for name in BOTH for place in ("around", "inside")]
SEEN = [(name, "begins", True) for name in ORDER]
SEEN += [(name, "ends", True) for name in reversed(ORDER)]


@pytest.mark.parametrize(
    ("cache", "where"), [("EasyCache", ["low"]), ("LazyCache", ["high"]), ("EasyCache", BOTH)]
)
def test_wrappers_find_the_options_of_their_own_model(cache, where, caplog):
    """As in two runs of ComfyUI's sampler, of which the results are equal."""
    caplog.set_level(logging.INFO)

    def skipped():  # the numbers of steps that caches log at the end of a run
        texts = [text for text in caplog.messages if "skipped" in text]
        caplog.clear()
        return sorted(text.split("skipped ")[1].split("/")[0] for text in texts)

    high, low = (shifted(model, 5.0) for model in pair(cache, where, []).values())
    expected, saved = in_two(high, low, at=AT, steps=STEPS), skipped()
    assert len(saved) == len(where)
    assert "0" not in saved
    seen = []
    result = samples(**pair(cache, where, seen), steps=STEPS)
    assert seen == SEEN
    assert skipped() == saved
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("cache", ["EasyCache", "LazyCache"])
def test_two_caches_and_loras_of_one_network_are_separate(cache):
    """Both stages may be clones of one model, each with its own."""
    one, other = (cached(fast(expert(), lora(seed), 0.8), cache) for seed in (0, 1))
    expected = in_two(shifted(one, 5.0), shifted(other, 5.0), at=AT, steps=STEPS)
    result = samples(model_high=one, model_low=other, steps=STEPS)
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize(
    ("cache", "where", "place", "count"),
    [
        ("EasyCache", BOTH, "call", STEPS),
        ("LazyCache", ["low"], "call", STEPS - 2),  # it skips calls, EasyCache the network in one
        ("EasyCache", ["low"], "enter", 1),  # the wrapper of the inner model
        ("EasyCache", BOTH, "leave", 1),
        ("EasyCache", ["high"], "load", 2),  # at the start, and at the switch
    ],
)
def test_an_error_anywhere_is_raised_as_it_is(monkeypatch, cache, where, place, count):
    """After it, all is as before; the next run succeeds."""
    import comfy.model_base
    import comfy.model_management
    import comfy.sampler_helpers
    from comfy.patcher_extension import WrappersMP

    seen, failing = [], {"left": -1}
    models = pair(cache, where, seen)

    def may_fail(original, name):
        def call(*args, **kwargs):
            failing["left"] -= name == place
            if name == place and failing["left"] == 0:
                failing["left"] = failing["more"]
                raise failing["error"]
            return original(*args, **kwargs)

        return call

    def wrapper(executor, *args, **kwargs):
        may_fail(lambda: None, "enter")()
        result = executor(*args, **kwargs)
        may_fail(lambda: None, "leave")()
        return result

    models["model_low"].add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "broken", wrapper)
    base, helpers = comfy.model_base.BaseModel, comfy.sampler_helpers
    monkeypatch.setattr(base, "_apply_model", may_fail(base._apply_model, "call"))
    monkeypatch.setattr(helpers, "prepare_sampling", may_fail(helpers.prepare_sampling, "load"))

    def state():
        options = [model.model_options["transformer_options"] for model in models.values()]
        return states(models), [
            repr(vars(one["easycache"])) for one in options if "easycache" in one
        ]

    expected, before = samples(**models, steps=STEPS), state()
    errors = [
        comfy.model_management.InterruptProcessingException(),
        KeyError("a"),
        torch.cuda.OutOfMemoryError("no memory is left"),
    ]
    for at, error in zip(sorted({0, count // 2, count - 1}), errors, strict=False):
        seen.clear()
        # Where memory runs out, each retry fails too.
        failing.update(left=at + 1, error=error, more=1 if error is errors[2] else -1)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            samples(**models, steps=STEPS)
        assert caught.value is error
        begun = [name for name, event, _ in seen if event == "begins"]
        assert seen[len(begun) :] == [(name, "ends", True) for name in reversed(begun)]
        assert state() == before
        assert all(model.model.current_patcher is None for model in experts().values())
        seen.clear()
        failing["left"] = -1
        assert torch.equal(samples(**models, steps=STEPS), expected)
        assert seen == SEEN
