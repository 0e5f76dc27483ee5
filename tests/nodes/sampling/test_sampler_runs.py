"""Wan Sampler (Fast): logs, errors and cleanup of a run, with wrappers of other packs around it.

A wrapper of a run, such as that of ComfyUI's EasyCache, changes the guider's options and restores
them in its `finally`: there it must find those of its own model, and no error of it may replace the
error that stopped the run.
"""

import itertools
import logging
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
        ({"boundary": "nan"}, "boundary: got 'nan'"),
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


# Four steps of each expert: a cache needs two before it skips one.
STEPS, AT = 8, 4
CACHES = {"EasyCache": "EasyCacheNode", "LazyCache": "LazyCacheNode"}
EXPERTS = {"none": (), "high": ("high",), "low": ("low",), "both": ("high", "low")}
CHANGED = 1e-2


def cached(model, cache):
    """A model with a cache that skips every step that it may."""
    return v3_node(
        "nodes_easycache", CACHES[cache], model=model, reuse_threshold=1000.0, start_percent=0.0,
        end_percent=1.0, verbose=False,
    )[0]  # fmt: skip


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
            same = [one is other for one, other in zip(found, after, strict=True)]
            seen.append((name, "ends", *same))

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, name, wrapper)
    return clone


def pair(cache, where, seen=None):
    """Both experts with LoRAs, and caches on some of them between two watching wrappers."""
    models = {}
    for key, model in experts().items():
        name = key.removeprefix("model_")
        patched = fast(model, lora(0), 0.8)
        if seen is not None:
            patched = watched(patched, f"around {name}", seen)
        if name in EXPERTS[where]:
            patched = cached(patched, cache)
        if seen is not None:
            patched = watched(patched, f"inside {name}", seen)
        models[key] = patched
    return models


ORDER = ("around high", "inside high", "around low", "inside low")
SEEN = [
    *((name, "begins", True) for name in ORDER),
    *((name, "ends", True, True, True) for name in reversed(ORDER)),
]
ROWS = [
    ("EasyCache", "low"), ("LazyCache", "high"), ("EasyCache", "both"), ("EasyCache", "none"),
]  # fmt: skip


def skipped(messages):
    """Numbers of the steps that caches skipped, as they log them at the end of a run."""
    return sorted(text.split("skipped ")[1].split("/")[0] for text in messages if "skipped" in text)


@pytest.mark.parametrize(("cache", "where"), ROWS)
def test_wrappers_find_the_options_of_their_own_model(cache, where, caplog):
    """As in two runs of ComfyUI's sampler, of which the results are equal."""
    caplog.set_level(logging.INFO)
    seen, given = [], pair(cache, where)
    expected = in_two(*(shifted(model, 5.0) for model in given.values()), at=AT, steps=STEPS)
    saved = skipped(caplog.messages)
    assert len(saved) == len(EXPERTS[where])
    assert "0" not in saved
    caplog.clear()
    models = pair(cache, where, seen)
    result = samples(**models, steps=STEPS)
    assert seen == SEEN
    assert skipped(caplog.messages) == saved
    assert relative_error(result, expected) < ROUNDING
    if saved:
        without = samples(**pair(cache, "none"), steps=STEPS)
        assert relative_error(result, without) > CHANGED


@pytest.mark.parametrize("cache", CACHES)
def test_two_caches_and_loras_of_one_network_are_separate(cache):
    """Both stages may be clones of one model, each with its own."""
    (model, _) = experts().values()
    models = [cached(fast(model, lora(seed), 0.8), cache) for seed in (0, 1)]
    high, low = (shifted(model, 5.0) for model in models)
    expected = in_two(high, low, at=AT, steps=STEPS)
    result = samples(model_high=models[0], model_low=models[1], steps=STEPS)
    assert relative_error(result, expected) < ROUNDING
    same = samples(model_high=models[0], model_low=models[0].clone(), steps=STEPS)
    assert relative_error(same, expected) > CHANGED


class PackError(Exception):
    """An error of another pack."""


def error_of(kind):
    """The user stops, memory runs out in every retry, or another pack fails."""
    import comfy.model_management

    if kind == "memory":
        return torch.cuda.OutOfMemoryError("no memory is left")
    return comfy.model_management.InterruptProcessingException() if kind == "stop" else PackError()


class Stops:
    """Runs of two experts that fail, and what they leave."""

    def __init__(self, cache, where):
        self.seen = []
        self.models = pair(cache, where, self.seen)
        self.given = self.models | {"steps": STEPS}
        self.expected = samples(**self.given)
        self.before = self.state()

    def state(self):
        holders = [
            vars(model.model_options["transformer_options"]["easycache"])
            for model in self.models.values()
            if "easycache" in model.model_options["transformer_options"]
        ]
        return states(self.models), repr(holders)

    def check(self, error):
        """Run and fail with `error`; then all is as before."""
        self.seen.clear()
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            samples(**self.given)
        assert caught.value is error
        begun = [name for name, event, *_ in self.seen if event == "begins"]
        ends = [row for row in self.seen if row[1] == "ends"]
        assert ends == [(name, "ends", True, True, True) for name in reversed(begun)]
        assert self.state() == self.before
        assert all(model.model.current_patcher is None for model in experts().values())

    def check_next(self):
        """Run to the end, as before any stop."""
        self.seen.clear()
        assert torch.equal(samples(**self.given), self.expected)
        assert self.seen == SEEN


@pytest.fixture
def failing(comfyui, monkeypatch):
    """Let the model raise an error from one of its calls on; yield the count of the calls."""
    import comfy.model_base

    apply_model, state = comfy.model_base.BaseModel._apply_model, {}

    def failing(self, *args, **kwargs):
        if next(state["calls"]) >= state["at"]:
            raise state["error"]
        return apply_model(self, *args, **kwargs)

    def set_to(error=None, at=None):
        state.update(error=error, at=float("inf") if at is None else at, calls=itertools.count())

    set_to()
    monkeypatch.setattr(comfy.model_base.BaseModel, "_apply_model", failing)
    set_to.state = state
    return set_to


STOPS = [
    ("EasyCache", "low", "stop"),
    ("LazyCache", "low", "memory"),
    ("EasyCache", "high", "other"),
    ("EasyCache", "none", "stop"),
]


@pytest.mark.parametrize(("cache", "where", "kind"), STOPS)
def test_a_stop_at_any_call_is_raised_as_it_is(cache, where, kind, failing):
    run = Stops(cache, where)
    count = next(failing.state["calls"])  # LazyCache skips calls, EasyCache the network in a call
    assert count == STEPS - (2 * len(EXPERTS[where]) if cache == "LazyCache" else 0)
    for at in range(count):
        error = error_of(kind)
        failing(error, at)
        run.check(error)
        if at in (0, count // 2, count - 1):  # the first call of each expert, and the last of all
            failing()
            run.check_next()


@pytest.mark.parametrize(("where", "when"), [("low", "entry"), ("both", "exit")])
def test_an_error_of_a_wrapper_is_raised_as_it_is(where, when):
    """In the wrapper of the inner model, before and after the run."""
    from comfy.patcher_extension import WrappersMP

    run, error = Stops("EasyCache", where), PackError()

    def wrapper(executor, *args, **kwargs):
        if when == "exit":
            executor(*args, **kwargs)
        raise error

    low = run.models["model_low"].clone()
    low.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "broken", wrapper)
    run.given["model_low"] = low
    run.check(error)
    run.given["model_low"] = run.models["model_low"]
    run.check_next()


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_loading_a_model_is_raised_as_it_is(number, monkeypatch):
    """The first model at the start, or the second one at the switch."""
    import comfy.sampler_helpers

    run, error = Stops("EasyCache", "high"), PackError()
    prepare, loads = comfy.sampler_helpers.prepare_sampling, itertools.count()

    def failing(*args, **kwargs):
        if next(loads) == number:
            raise error
        return prepare(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(comfy.sampler_helpers, "prepare_sampling", failing)
        run.check(error)
    run.check_next()
