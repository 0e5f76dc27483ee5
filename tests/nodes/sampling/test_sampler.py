"""Wan Sampler (Fast) against ComfyUI's own samplers, on small models with random weights."""

import pytest
import torch

from fast_video_vae.tests.nodes.diffusion import KINDS
from fast_video_vae.tests.nodes.lora.lora_models import (
    ROUNDING,
    apply,
    core,
    lora,
    relative_error,
    stack,
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
    slow,
)
from fast_video_vae.tests.nodes.vae.pairs import v3_node

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

# Least difference of two runs that are not the same.
DIFFERENT = 1e-3

AUTO = dict.fromkeys(("cfg_high", "cfg_low", "shift_high", "sampler_name", "scheduler"), "auto")


@pytest.fixture
def calls(monkeypatch):
    """Record the calls: expert, noise level and number of rows."""
    import comfy.model_base

    seen = []
    apply_model = comfy.model_base.BaseModel.apply_model

    def noted(self, x, t, *args, **kwargs):
        low = any(self is expert(kind, 1).model for kind in ("wan21-t2v", "wan22-14b-i2v"))
        seen.append(("L" if low else "H", round(float(t.flatten()[0]), 4), len(x)))
        return apply_model(self, x, t, *args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", noted)
    return seen


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        ("wan21-t2v", (1.0, 1.0)),  # the distilled LoRAs
        ("wan21-t2v", (4.0, 3.0)),  # published, of each expert its own
        ("wan22-14b-i2v", (3.5, 3.5)),  # with an image as extra channels
        slow("vace", (4.0, 4.0)),
    ],
)
def test_two_experts_equal_two_advanced_samplers(kind, cfg):
    high, low = (shifted(model, 5.0) for model in experts(kind).values())
    result = samples(kind, cfg_high=str(cfg[0]), cfg_low=str(cfg[1]))
    assert relative_error(result, in_two(high, low, kind, cfg=cfg)) < ROUNDING
    assert relative_error(result, in_two(low, high, kind, cfg=cfg)) > DIFFERENT


def test_a_preset_fills_in_what_is_auto(calls):
    result = run(preset="4-step", steps=0, **AUTO)
    assert result["sigmas"].tolist() == pytest.approx([1, 0.9375, 0.83333, 0.625, 0], abs=1e-5)
    expected = [("H", 1.0, 1), ("H", 0.9375, 1), ("L", 0.8333, 1), ("L", 0.625, 1)]
    assert calls == expected  # one row: no negative pass
    first = run(steps=0, end_at_step=1, **AUTO)["report"].splitlines()  # published for two experts
    assert first == [
        "uni_pc, 1 steps",
        "high noise: steps 1-1, noise level 1.0000 to 0.0000, CFG 4",
    ]
    assert len(run(steps=0, start_at_step=39, **AUTO)["sigmas"]) == 2


@pytest.mark.parametrize(
    ("kind", "boundary", "steps", "expected"),
    [
        ("wan21-t2v", "auto", 4, "HHLL"),  # 0.875
        ("wan22-14b-i2v", "auto", 8, "HHHLLLLL"),  # 0.9; sigmas 1, 0.972, 0.9375, 0.893, 0.833
        ("wan21-t2v", "0.9375", 4, "HHLL"),  # a level of the list: the first expert serves it
        ("wan21-t2v", "0.8333333", 4, "HHHL"),
        ("wan21-t2v", "0.0", 4, "HHHH"),
        ("wan21-t2v", "1", 4, "HLLL"),  # a step
        ("wan21-t2v", "0", 4, "LLLL"),
        ("wan21-t2v", "40", 4, "HHHH"),
    ],
)
def test_the_boundary_is_a_noise_level_or_a_step(calls, kind, boundary, steps, expected):
    run(kind, boundary=boundary, steps=steps)
    assert "".join(name for name, *_ in calls) == expected


@pytest.mark.parametrize(
    ("sampler", "given"),
    [
        ("euler", {"cfg": 4.0}),
        ("uni_pc", {}),
        ("euler", {"denoise": 0.5}),  # of a latent with a mask
        slow("dpmpp_2m", {"cfg": 4.0}),
    ],
)
def test_one_expert_equals_ksampler(sampler, given):
    latent = {"samples": torch.randn(1, 16, 3, 8, 8), "noise_mask": torch.ones(1, 1, 3, 8, 8)}
    latent["noise_mask"][..., :4] = 0
    latent = latent if "denoise" in given else empty()
    expected = ksampler(shifted(expert(), 5.0), sampler=sampler, latent=latent, **given)
    same = {"sampler_name": sampler, "latent_image": latent, "denoise": given.get("denoise", 1.0)}
    result = samples(model_low=None, cfg_high=str(given.get("cfg", 1)), **same)
    assert relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize(
    "kind", [kind if kind == "qwen-image" else slow(kind) for kind in KINDS if kind != "wan21-t2v"]
)
def test_every_kind_of_model_works_as_one_expert(kind):
    model = expert(kind)
    if "wan" in model.model.model_config.unet_config["image_model"]:
        model = shifted(model, 5.0)  # the shift of the preset; other models keep their own
    expected = ksampler(model, kind, cfg=3.0, steps=2)
    result = samples(kind, model_low=None, shift_high="auto", preset="base", steps=2, cfg_high="3")
    assert relative_error(result, expected) < ROUNDING


def test_patches_of_other_nodes_apply_to_both_experts():
    """Context windows of two latent frames."""
    window = {"context_length": 5, "context_overlap": 4, "context_schedule": "standard_uniform"}
    window |= {"context_stride": 1, "closed_loop": False, "fuse_method": "pyramid"}
    node = "nodes_context_windows", "WanContextWindowsManualNode"
    high, low = (
        v3_node(*node, model=each, freenoise=True, **window)[0] for each in experts().values()
    )
    result = samples(model_high=high, model_low=low)
    assert relative_error(result, samples()) > DIFFERENT
    assert relative_error(result, in_two(shifted(high, 5.0), shifted(low, 5.0))) < ROUNDING


@pytest.mark.parametrize(
    ("sampler", "remembers"),
    [
        ("uni_pc", True),
        slow("dpmpp_2m", True),
        # These models run the negative pass even at CFG 1, through a function that they add.
        ("euler_cfg_pp", False),
    ],
)
def test_a_multistep_sampler_continues_over_the_switch(sampler, remembers):
    """Two experts with equal weights act as one model; two samplers in a row would restart."""
    one, other = expert("wan21-t2v", 0), expert("wan21-t2v", 0).clone()
    expected = ksampler(shifted(one, 5.0), steps=6, sampler=sampler)
    given = {"model_high": one, "model_low": other, "steps": 6, "sampler_name": sampler}
    assert relative_error(samples(**given, boundary="3"), expected) < ROUNDING
    if remembers:
        apart = in_two(shifted(one, 5.0), shifted(other, 5.0), at=3, steps=6, sampler=sampler)
        assert relative_error(apart, expected) > DIFFERENT


def test_calls_between_steps_use_the_expert_of_their_noise_level(calls):
    run(sampler_name="dpm_2")
    assert all(name == ("H" if sigma >= 0.875 else "L") for name, sigma, _ in calls)
    assert len({sigma for _, sigma, _ in calls}) > 4
    assert {name for name, *_ in calls} == {"H", "L"}


def test_each_step_has_its_guidance(calls):
    run(cfg_high="3.5,1", cfg_low="1,2")
    # Both passes in one call where there are two.
    assert [each[1:] for each in calls] == [(1.0, 2), (0.9375, 1), (0.8333, 1), (0.625, 2)]
    given = {"cfg_high": "3.5,1,1,1", "cfg_low": "1,1,1,2"}  # values for all steps
    assert torch.equal(samples(**given), samples(cfg_high="3.5,1", cfg_low="1,2"))
    assert relative_error(samples(cfg_high="3.5,1"), samples(cfg_high="1,3.5")) > DIFFERENT


def test_each_step_has_its_shift():
    sigmas = {shift: run(shift_high=shift)["sigmas"] for shift in ("8", "5")}
    result = run(shift_high="8", shift_low="5", boundary="2")["sigmas"]
    assert torch.equal(result, torch.cat([sigmas["8"][:2], sigmas["5"][2:]]))
    assert torch.equal(run(shift_high="8,8,5,5", boundary="2")["sigmas"], result)


def test_given_noise_levels_are_used_unchanged(calls):
    given = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
    before = given.clone()
    result = run(sigmas=given, sampler_name="uni_pc")
    assert torch.equal(result["sigmas"], given)
    assert torch.equal(given, before)  # this solver writes its last level into the list
    assert [name for name, *_ in calls] == ["H", "H", "L", "L"]


def test_two_parts_of_a_run_equal_the_whole_run(calls):
    whole = samples(cfg_high="2", cfg_low="3")
    for at in (1, 2, 3):  # within the first expert, at the switch, within the second
        given = {"cfg_high": "2", "cfg_low": "3"}
        first = run(**given, end_at_step=at, return_with_leftover_noise="enable")
        calls.clear()
        part = {"add_noise": "disable", "latent_image": first["LATENT"], "start_at_step": at}
        assert relative_error(samples(**given, **part), whole) < ROUNDING
        assert [name for name, *_ in calls] == [*"HHLL"[at:]]
    assert run(end_at_step=2)["sigmas"].tolist() == pytest.approx([1, 0.9375, 0])


@pytest.mark.parametrize("low", [expert, None], ids=["two", "one"])
def test_a_run_without_steps_returns_the_latent(calls, low):
    latent = {"samples": torch.randn(1, 16, 3, 8, 8)}
    model = low("wan21-t2v", 1) if low else None
    for given in ({"denoise": 0.0}, {"start_at_step": 4}, {"start_at_step": 2, "end_at_step": 2}):
        result = run(model_low=model, latent_image=latent, **given)
        assert result["LATENT"]["samples"] is latent["samples"]
    assert not calls


def test_denoised_is_the_estimate_of_the_last_step():
    result = run(end_at_step=2, return_with_leftover_noise="enable")
    assert relative_error(result["denoised"]["samples"], result["LATENT"]["samples"]) > DIFFERENT
    whole = run()  # a step of euler to noise level 0 gives just that
    assert relative_error(whole["denoised"]["samples"], whole["LATENT"]["samples"]) < ROUNDING


def test_three_phases_equal_three_advanced_samplers():
    """The first steps without the LoRA and with guidance, then with it, then the other expert."""
    files = [lora(seed) for seed in (0, 1)]
    high, low = (shifted(model, 5.0) for model in experts().values())
    known = {"known": prompts(), "steps": 8, "sampler": "euler"}
    with torch.inference_mode():
        first = advanced("enable", model=high, latent=empty(), cfg=3.5, start=0, end=2, **known)
        one, two = core(high, files[0], 0.8), core(low, files[1], 0.6)
        second = advanced("disable", model=one, latent=first, cfg=1.0, start=2, end=4, **known)
        last = advanced("disable", model=two, latent=second, cfg=1.0, start=4, **known)
    loras = {"loras_high": stack(files[0], 0.8), "loras_low": stack(files[1], 0.6)}
    result = samples(preset="three-phase", steps=0, **AUTO, **loras)
    assert relative_error(result, last["samples"]) < ROUNDING
    named = {"loras_high": stack(files[0], "0;0.8;0"), "loras_low": stack(files[1], "0;0;0.6")}
    assert torch.equal(samples(preset="three-phase", steps=0, **AUTO, **named), result)


@pytest.mark.parametrize("mode", ["auto", "merged"])
def test_loras_of_each_expert_equal_comfyuis_loader(mode):
    files, models = [lora(seed) for seed in (0, 1)], experts()
    high, low = (
        core(shifted(model, 5.0), file, 0.8)
        for model, file in zip(models.values(), files, strict=True)
    )
    given = {"loras_high": stack(files[0], 0.8), "loras_low": stack(files[1], 0.8)}
    result = samples(**given, lora_mode=mode)
    assert relative_error(result, in_two(high, low)) < ROUNDING
    # One stack for both, whose strengths say which is whose; of the node and of Apply LoRA.
    both = stack(files[1], "0;0.8", before=stack(files[0], "0.8;0"))
    again = samples(loras_high=both, loras_low=both, lora_mode=mode)
    assert relative_error(again, result) < ROUNDING
    if mode == "auto":
        applied = {name: apply(model, both)[0] for name, model in models.items()}
        assert relative_error(samples(**applied), result) < ROUNDING


def test_a_list_of_strengths_is_spread_over_the_steps_of_its_phase():
    file = lora(1)
    listed = samples(steps=6, boundary="2", loras_low=stack(file, "0;0.9,0.3"))
    # By hand: the steps 2, 3 at 0.9 and 4, 5 at 0.3, as windows of the run.
    parts = stack(file, "0.3@0.6666-1", before=stack(file, "0.9@0.3333-0.6666"))
    assert relative_error(samples(steps=6, boundary="2", loras_low=parts), listed) < ROUNDING
