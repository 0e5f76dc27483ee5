"""Wan Sampler (Fast) beside ComfyUI's own samplers, on small models with random weights."""

import pytest
import torch

from fast_video_vae.tests.nodes.lora.lora_models import (
    KINDS,
    ROUNDING,
    apply,
    core,
    lora_for,
    random_weights,
    relative_error,
    save_lora,
    stack,
    weights,
)
from fast_video_vae.tests.nodes.sampling.sampler_models import (
    advanced,
    empty,
    expert,
    experts,
    in_two,
    ksampler,
    prompts,
    run,
    samples,
    shifted,
)
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# Least difference of two runs that are not the same.
DIFFERENT = 1e-3


@pytest.fixture(scope="module", autouse=True)
def _models_go_with_the_module():
    yield
    expert.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Which network was called at which noise level, and how many rows it was given."""
    import comfy.model_base

    seen = []
    apply_model = comfy.model_base.BaseModel.apply_model

    def noted(self, x, t, *args, **kwargs):
        seen.append((self, round(float(t.flatten()[0]), 4), len(x)))
        return apply_model(self, x, t, *args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", noted)
    return seen


def names(calls, models):
    known = {id(model.model): name for name, model in models.items()}
    return [(known[id(base)].removeprefix("model_"), sigma) for base, sigma, _ in calls]


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        ("wan21-t2v", (1.0, 1.0)),  # the distilled LoRAs
        ("wan21-t2v", (4.0, 3.0)),  # published, of each expert its own
        ("wan22-14b-i2v", (3.5, 3.5)),  # with an image beside the latent
        ("vace", (4.0, 4.0)),
        ("wan21-i2v", (1.0, 2.0)),  # with an image's embedding
    ],
)
def test_two_experts_are_two_advanced_samplers(kind, cfg):
    both = experts(kind)
    high, low = (shifted(model, 5.0) for model in both.values())
    expected = in_two(high, low, kind, cfg=cfg)
    result = samples(kind, cfg_high=str(cfg[0]), cfg_low=str(cfg[1]))
    assert relative_error(result, expected) < ROUNDING
    assert relative_error(result, in_two(low, high, kind, cfg=cfg)) > DIFFERENT


def test_four_steps_of_the_published_list_are_two_and_two(calls):
    both = experts()
    result = run(preset="4-step", steps=0, sampler_name="auto", scheduler="auto", shift_high="auto",
                 cfg_high="auto", cfg_low="auto")  # fmt: skip
    assert names(calls, both) == [
        ("high", 1.0),
        ("high", 0.9375),
        ("low", 0.8333),
        ("low", 0.625),
    ]
    assert {rows for _, _, rows in calls} == {1}  # no negative pass
    assert result["sigmas"].tolist() == pytest.approx([1, 0.9375, 0.83333, 0.625, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("auto", "HHLL"),  # 0.875
        ("0.875", "HHLL"),
        ("0.9375", "HHLL"),  # a level of the list: the first expert serves it
        ("0.94", "HLLL"),
        ("0.8333333", "HHHL"),
        ("1.0", "HLLL"),
        ("0.0", "HHHH"),
        ("1", "HLLL"),  # a step
        ("3", "HHHL"),
        ("0", "LLLL"),
        ("4", "HHHH"),
        ("40", "HHHH"),
    ],
)
def test_the_boundary_is_a_noise_level_or_a_step(calls, boundary, expected):
    run(boundary=boundary)
    assert "".join(name[0].upper() for name, _ in names(calls, experts())) == expected


def test_with_an_image_the_boundary_is_0_9(calls):
    kind = "wan22-14b-i2v"
    run(kind, steps=8)  # sigmas 1, 0.972, 0.9375, 0.893, 0.833, ...
    found = names(calls, experts(kind))
    assert [sigma for name, sigma in found if name == "high"] == [1.0, 0.9722, 0.9375]


@pytest.mark.parametrize("sampler", ["euler", "uni_pc", "dpmpp_2m", "heun", "res_multistep"])
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_one_expert_is_ksampler(sampler, cfg):
    expected = ksampler(shifted(expert(), 5.0), cfg=cfg, sampler=sampler)
    result = samples(model_low=None, cfg_high=str(cfg), sampler_name=sampler)
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("denoise", [0.5, 0.8])
def test_one_expert_of_another_latent_is_ksampler(denoise):
    latent = {"samples": torch.randn(1, 16, 3, 8, 8), "noise_mask": torch.ones(1, 1, 3, 8, 8)}
    latent["noise_mask"][..., :4] = 0
    expected = ksampler(shifted(expert(), 5.0), denoise=denoise, latent=latent)
    result = samples(model_low=None, denoise=denoise, latent_image=latent)
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_one_expert(kind):
    expected = ksampler(expert(kind), kind, cfg=3.0, steps=2)
    result = samples(kind, model_low=None, shift_high="auto", preset="base", steps=2, cfg_high="3")
    if "wan" in expert(kind).model.model_config.unet_config["image_model"]:  # the preset has one
        expected = ksampler(shifted(expert(kind), 5.0), kind, cfg=3.0, steps=2)
    assert relative_error(result, expected) < ROUNDING


def windows(model):
    """A model that sees two latent frames at a time."""
    return v3_node(
        "nodes_context_windows", "WanContextWindowsManualNode", model=model, context_length=5,
        context_overlap=4, context_schedule="standard_uniform", context_stride=1,
        closed_loop=False, fuse_method="pyramid", freenoise=True,
    )[0]  # fmt: skip


def cached(model):
    """A model that leaves out steps which are like the one before."""
    return v3_node(
        "nodes_easycache", "EasyCacheNode", model=model, reuse_threshold=2.0, start_percent=0.0,
        end_percent=1.0, verbose=False,
    )[0]  # fmt: skip


@pytest.mark.parametrize("patch", [windows, cached])
def test_what_other_nodes_make_of_the_models_holds_for_both_experts(patch):
    high, low = (patch(model) for model in experts().values())
    plain = samples(steps=8)
    given = {"model_high": high, "model_low": low, "steps": 8, "boundary": "4"}
    result = samples(**given)
    assert relative_error(result, plain) > DIFFERENT
    expected = in_two(shifted(high, 5.0), shifted(low, 5.0), at=4, steps=8)
    assert relative_error(result, expected) < ROUNDING
    assert torch.equal(samples(**given), result)


def test_qwen_image_is_one_expert_with_a_shift_of_its_own():
    kind = "qwen-image"
    expected = ksampler(expert(kind), kind, cfg=4.0)
    result = samples(kind, model_low=None, shift_high="auto", cfg_high="4")
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("sampler", ["uni_pc", "uni_pc_bh2", "dpmpp_2m", "ipndm", "res_multistep"])
def test_a_solver_keeps_its_memory_over_the_switch(sampler):
    """Two experts with the same weights are one model; two samplers in a row begin anew."""
    one, other = expert("wan21-t2v", 0), expert("wan21-t2v", 0).clone()
    expected = ksampler(shifted(one, 5.0), steps=6, sampler=sampler)
    given = {"model_high": one, "model_low": other, "steps": 6, "sampler_name": sampler}
    assert relative_error(samples(**given, boundary="3"), expected) < ROUNDING
    apart = in_two(shifted(one, 5.0), shifted(other, 5.0), at=3, steps=6, sampler=sampler)
    assert relative_error(apart, expected) > DIFFERENT


def test_a_solver_of_several_stages_finds_its_expert_between_steps(calls):
    run(sampler_name="dpm_2", steps=4)
    found = names(calls, experts())
    assert found == [("high" if sigma >= 0.875 else "low", sigma) for _, sigma in found]
    assert len({sigma for _, sigma in found}) > 4
    assert {name for name, _ in found} == {"high", "low"}


@pytest.mark.parametrize("sampler", ["euler_cfg_pp", "euler_ancestral_cfg_pp"])
def test_what_a_sampler_asks_of_guidance_holds_for_both_experts(sampler):
    """These take the negative pass even at CFG 1, through a function that they add."""
    one, other = expert("wan21-t2v", 0), expert("wan21-t2v", 0).clone()
    expected = ksampler(shifted(one, 5.0), sampler=sampler)
    result = samples(model_high=one, model_low=other, sampler_name=sampler)
    assert relative_error(result, expected) < ROUNDING


def test_guidance_of_each_step(calls):
    run(cfg_high="3.5,1", cfg_low="1,2")
    # Both passes in one call where there are two.
    assert [(sigma, rows) for _, sigma, rows in calls] == [
        (1.0, 2), (0.9375, 1), (0.8333, 1), (0.625, 2),
    ]  # fmt: skip
    given = {"cfg_high": "3.5,1,1,1", "cfg_low": "1,1,1,2"}  # of all steps
    assert torch.equal(samples(**given), samples(cfg_high="3.5,1", cfg_low="1,2"))
    assert relative_error(samples(cfg_high="3.5,1"), samples(cfg_high="1,3.5")) > DIFFERENT


def test_each_expert_has_its_shift():
    sigmas = {shift: run(shift_high=shift)["sigmas"] for shift in ("8", "5")}
    result = run(shift_high="8", shift_low="5", boundary="2")["sigmas"]
    assert torch.equal(result, torch.cat([sigmas["8"][:2], sigmas["5"][2:]]))
    listed = run(shift_high="8,8,5,5", boundary="2")["sigmas"]
    assert torch.equal(listed, result)


def test_given_noise_levels_are_run_as_they_are(calls):
    given = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
    before = given.clone()
    result = run(sigmas=given, sampler_name="uni_pc")
    assert torch.equal(result["sigmas"], given)
    assert torch.equal(given, before)  # this solver writes its last level into the list
    assert [name for name, _ in names(calls, experts())] == ["high", "high", "low", "low"]


def test_a_run_in_two_halves_is_the_whole():
    whole = samples(cfg_high="2", cfg_low="3")
    for at in (1, 2, 3):  # within the first expert, at the switch, within the second
        given = {"cfg_high": "2", "cfg_low": "3"}
        first = run(**given, end_step=at, leftover_noise="enable")["LATENT"]
        rest = samples(**given, start_step=at, add_noise="disable", latent_image=first)
        assert relative_error(rest, whole) < ROUNDING


def test_only_the_second_expert_is_loaded_where_the_run_begins_with_it(calls):
    run(start_step=2)
    assert [name for name, _ in names(calls, experts())] == ["low", "low"]


def test_a_run_that_ends_early_without_leftover_noise_goes_to_0():
    result = run(end_step=2)
    assert result["sigmas"].tolist() == pytest.approx([1, 0.9375, 0])


@pytest.mark.parametrize("low", [expert, None], ids=["two", "one"])
def test_a_run_without_steps_gives_the_latent_as_it_is(calls, low):
    latent = {"samples": torch.randn(1, 16, 3, 8, 8)}
    model = low("wan21-t2v", 1) if low else None
    for given in ({"denoise": 0.0}, {"start_step": 4}, {"start_step": 2, "end_step": 2}):
        result = run(model_low=model, latent_image=latent, **given)
        assert result["LATENT"]["samples"] is latent["samples"]
    assert not calls


def test_denoised_is_what_the_last_step_saw():
    result = run(end_step=2, leftover_noise="enable")
    assert relative_error(result["denoised"]["samples"], result["LATENT"]["samples"]) > DIFFERENT
    whole = run()  # a step of euler to noise level 0 gives just that
    assert relative_error(whole["denoised"]["samples"], whole["LATENT"]["samples"]) < ROUNDING


def test_three_phases_are_three_advanced_samplers(tmp_path):
    """The first steps without the LoRA and with guidance, then with it, then the other expert."""
    files = [
        save_lora(
            lora_for(random_weights("wan21-t2v", seed), seed=seed + 3), f"three-{seed}.safetensors"
        )
        for seed in (0, 1)
    ]
    high, low = (shifted(model, 5.0) for model in experts().values())
    known = {"known": prompts(), "steps": 8, "sampler": "euler"}
    with torch.inference_mode():
        first = advanced("enable", model=high, latent=empty(), cfg=3.5, start=0, end=2,
                          leftover="enable", **known)  # fmt: skip
        second = advanced("disable", model=core(high, files[0], 0.8), latent=first, cfg=1.0,
                           start=2, end=4, leftover="enable", **known)  # fmt: skip
        last = advanced("disable", model=core(low, files[1], 0.6), latent=second, cfg=1.0,
                         start=4, end=10000, leftover="disable", **known)  # fmt: skip
    auto = dict.fromkeys(("cfg_high", "cfg_low", "shift_high", "sampler_name", "scheduler"), "auto")
    loras = {"loras_high": stack(files[0], 0.8), "loras_low": stack(files[1], 0.6)}
    result = run(preset="three-phase", steps=0, **auto, **loras)
    assert relative_error(result["LATENT"]["samples"], last["samples"]) < ROUNDING
    named = {"loras_high": stack(files[0], "0;0.8;0"), "loras_low": stack(files[1], "0;0;0.6")}
    assert torch.equal(
        samples(preset="three-phase", steps=0, **auto, **named), result["LATENT"]["samples"]
    )


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_loras_of_each_expert_are_those_of_comfyuis_loader(mode):
    files = [
        save_lora(
            lora_for(random_weights("wan21-t2v", seed), seed=seed), f"each-{seed}.safetensors"
        )
        for seed in (0, 1)
    ]
    high, low = (
        core(shifted(model, 5.0), file, 0.8)
        for model, file in zip(experts().values(), files, strict=True)
    )
    result = samples(
        loras_high=stack(files[0], 0.8), loras_low=stack(files[1], 0.8), lora_mode=mode
    )
    assert relative_error(result, in_two(high, low)) < ROUNDING
    # One stack for both, whose strengths say which is whose.
    both = stack(files[1], "0;0.8", before=stack(files[0], "0.8;0"))
    assert (
        relative_error(samples(loras_high=both, loras_low=both, lora_mode=mode), result) < ROUNDING
    )


def test_apply_lora_takes_the_phase_that_is_called():
    files = [
        save_lora(
            lora_for(random_weights("wan21-t2v", seed), seed=seed), f"auto-{seed}.safetensors"
        )
        for seed in (0, 1)
    ]
    strengths = ("0.8;0", "0;0.8")
    models = {
        name: apply(model, stack(file, strength))[0]
        for (name, model), file, strength in zip(experts().items(), files, strengths, strict=True)
    }
    expected = samples(loras_high=stack(files[0], 0.8), loras_low=stack(files[1], 0.8))
    assert torch.equal(samples(**models), expected)


def test_a_list_of_strengths_is_spread_over_the_steps_of_its_phase():
    file = save_lora(lora_for(random_weights("wan21-t2v", 1), seed=1), "spread.safetensors")
    listed = samples(steps=6, boundary="2", loras_low=stack(file, "0;0.9,0.3"))
    # By hand: the steps 2, 3 at 0.9 and 4, 5 at 0.3, as windows of the run.
    parts = stack(file, "0.3@0.6666-1", before=stack(file, "0.9@0.3333-0.6666"))
    assert relative_error(samples(steps=6, boundary="2", loras_low=parts), listed) < ROUNDING


@pytest.mark.parametrize("free_high", [False, True])
def test_a_run_leaves_the_models_as_they_were(free_high):
    both = experts()
    file = save_lora(lora_for(random_weights("wan21-t2v", 0), seed=0), "left.safetensors")
    latent, texts = empty(), prompts()
    before = states(both)
    given = {"loras_high": stack(file, 0.8), "free_high": free_high}
    first = samples(**given, latent_image=latent, **texts)
    after = states(both)
    assert after == before
    assert not latent["samples"].any()
    assert list(latent) == ["samples"]
    assert torch.equal(samples(**given), first)


def test_the_first_model_is_unloaded_at_the_switch_if_asked_for(monkeypatch):
    import comfy.model_management

    freed = []
    unload = comfy.model_management.unload_model_and_clones
    monkeypatch.setattr(
        comfy.model_management,
        "unload_model_and_clones",
        lambda model, *args, **kwargs: (freed.append(model.model), unload(model, *args, **kwargs)),
    )
    samples(free_high=True)
    assert freed == [experts()["model_high"].model]
    samples()
    assert len(freed) == 1


class Stopped(BaseException):
    """As ComfyUI's own, when a user stops a run."""


@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["first", "high", "switch", "low"])
def test_a_run_that_is_stopped_leaves_the_models_as_they_were(monkeypatch, at):
    import comfy.model_base

    both = experts()
    file = save_lora(lora_for(random_weights("wan21-t2v", 0), seed=0), "stopped.safetensors")
    given = {"loras_high": stack(file, 0.8), "loras_low": stack(file, 0.5)}
    expected = samples(**given)
    before = states(both)
    apply_model, count = comfy.model_base.BaseModel._apply_model, iter(range(100))

    def stopping(self, *args, **kwargs):
        if next(count) == at:
            raise Stopped
        return apply_model(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(comfy.model_base.BaseModel, "_apply_model", stopping)
        with pytest.raises(Stopped):
            samples(**given)
    assert states(both) == before
    assert all(model.model.current_patcher is None for model in both.values())
    assert torch.equal(samples(**given), expected)


def states(models):
    """All of several models; the shift of a clone stays in the network while that is loaded."""
    return {
        name: (
            {key: value for key, value in weights(model).items() if "model_sampling" not in key},
            state_of(model),
        )
        for name, model in models.items()
    }


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at", [1, 2], ids=["first-expert", "after-the-switch"])
def test_a_run_goes_on_where_memory_runs_out(monkeypatch, caplog, at, count):
    """In a call of a model: first other models are unloaded, then the weights of this one."""
    import comfy.model_base
    import comfy.sampler_helpers

    file = save_lora(lora_for(random_weights("wan21-t2v", 0), seed=0), "room.safetensors")
    given = {"loras_high": stack(file, 0.8), "loras_low": stack(file, 0.5)}
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


def test_memory_that_stays_short_is_an_error_that_leaves_the_models_as_they_were(monkeypatch):
    import comfy.model_base

    both = experts()
    expected, before = samples(), states(both)

    def scarce(self, *args, **kwargs):
        raise torch.cuda.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patched:
        patched.setattr(comfy.model_base.BaseModel, "_apply_model", scarce)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            samples()
    assert states(both) == before
    assert torch.equal(samples(), expected)


def state_of(model):
    """What a clone shares with the model, and what a run might leave in it."""
    return (
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


def test_wrappers_of_both_models_are_around_the_run():
    """Packs that remember things from step to step begin and end there."""
    from comfy.patcher_extension import WrappersMP

    seen = []

    def wrapper(name):
        def around(executor, *args, **kwargs):
            guider = executor.class_obj
            seen.append((name, "begins", guider.model_patcher.model is models[name].model))
            try:
                return executor(*args, **kwargs)
            finally:
                seen.append((name, "ends"))

        return around

    models = {name: model.clone() for name, model in experts().items()}
    for name, model in models.items():
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test", wrapper(name))
    samples(**models)
    assert seen == [
        ("model_high", "begins", True),
        ("model_low", "begins", True),
        ("model_low", "ends"),
        ("model_high", "ends"),
    ]


def test_noise_levels_of_each_call_are_told_to_both_models():
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


def test_the_report_says_what_ran():
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
        ({"boundary": "1.5"}, "boundary: '1.5' is not"),
        ({"boundary": "-0.1"}, "boundary: '-0.1' is not"),
        ({"boundary": "-1"}, "boundary: '-1' is not"),
        ({"boundary": "early"}, "boundary: 'early' is not"),
        ({"boundary": "nan"}, "boundary: 'nan' is not"),
        ({"cfg_high": "3.5;1"}, "cfg_high: '3.5;1' is not a number"),
        ({"cfg_low": "1,,2"}, "cfg_low: '1,,2' is not a number"),
        ({"cfg_high": "1,2,3"}, "cfg_high: 3 values; expected 1, 2 for its steps or 4"),
        ({"cfg_low": "1,2,3,4,5"}, "cfg_low: 5 values; expected 1, 2 for its steps or 4"),
        ({"shift_high": "5,5,5"}, "shift_high: 3 values; expected 1 or 4"),
        ({"shift_high": "1,2,3,900"}, "shift_high: step 3 begins at noise level 0.9967, not below"),
        ({"shift_high": "0"}, "shift_high: 0 is no shift"),
        ({"shift_low": "-3"}, "shift_low: -3 is no shift"),
        ({"shift_low": "90"}, "shift_low: step 2 begins at noise level 0.9890, not below"),
        ({"shift_low": "8"}, "shift_low: step 2 begins at noise level 0.8889, not below the bound"),
        ({"negative": None, "cfg_low": "2"}, "negative: nothing is connected, and cfg 2 needs it"),
        ({"positive": []}, "positive: the conditioning is empty"),
        ({"sigmas": torch.tensor([0.1, 0.9])}, "sigmas: they do not fall"),
        ({"latent_image": {"samples": torch.ones(1, 48, 3, 8, 8)}}, "latent_image: it has 48 chan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_before_anything_is_loaded(monkeypatch, given, message):
    import comfy.sampler_helpers

    def loads(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", loads)
    with pytest.raises(
        ValueError, match="^" + message.replace(".", r"\.").replace("(", r"\(")
    ) as error:
        run(**given)
    assert "\n" not in str(error.value)


def test_experts_with_other_latents_are_refused():
    with pytest.raises(ValueError, match=r"^model_low: its latents have 48 channels; expected 16"):
        run(model_low=expert("wan22-5b"))


def test_a_lora_for_another_model_is_refused():
    pair = {"lora_A": torch.ones(4, 8), "lora_B": torch.ones(8, 4)}
    pair = {f"some.where.{name}.weight": tensor for name, tensor in pair.items()}
    other = save_lora(pair, "other.safetensors")
    for name in ("loras_high", "loras_low"):
        with pytest.raises(ValueError, match=f"^{name}: .*other.safetensors") as error:
            run(**{name: stack(other)})
        assert "\n" not in str(error.value)


def test_loras_without_their_model_are_refused():
    with pytest.raises(ValueError, match=r"^loras_low: there is no model_low"):
        run(model_low=None, loras_low=stack(save_lora({"a": torch.ones(1)}, "a.safetensors")))


def test_strengths_of_other_phases_than_the_run_has_are_refused():
    file = save_lora(lora_for(random_weights("wan21-t2v")), "phases.safetensors")
    with pytest.raises(
        ValueError, match=r"^loras_high: strength '0;1;0' has 3 phases, but the run"
    ):
        run(loras_high=stack(file, "0;1;0"))
