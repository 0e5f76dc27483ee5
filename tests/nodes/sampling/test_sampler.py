"""Wan Sampler (Fast) against ComfyUI's own samplers, on small models with random weights."""

import random

import pytest
import torch

from fast_video_vae.tests.nodes.lora.lora_models import (
    ROUNDING,
    apply,
    core,
    lora,
    relative_error,
    stack,
)
from fast_video_vae.tests.nodes.sampling.sampler_models import (
    custom,
    empty,
    expert,
    experts,
    in_two,
    ksampler,
    levels_of,
    run,
    samples,
    shifted,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

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


def test_two_experts_equal_two_advanced_samplers():
    """With channels of an image, whose boundary is 0.9, of sigmas 1, 0.972, 0.9375, 0.893."""
    kind = "wan22-14b-i2v"
    models = [shifted(model, 5.0) for model in experts(kind).values()]
    result = samples(kind, cfg_high="4", cfg_low="3", steps=8)
    expected = in_two(*models, kind, cfg=(4.0, 3.0), steps=8, at=3)
    assert relative_error(result, expected) < ROUNDING


def test_a_preset_fills_in_what_is_auto(calls):
    result = run(preset="4-step", steps=0, **AUTO)
    assert result["sigmas"].tolist() == pytest.approx([1, 0.9375, 0.83333, 0.625, 0], abs=1e-5)
    expected = [("H", 1.0, 1), ("H", 0.9375, 1), ("L", 0.8333, 1), ("L", 0.625, 1)]
    assert calls == expected  # one row: no negative pass
    last = run(steps=0, start_at_step=39, **AUTO)["report"].splitlines()  # published for two
    assert last == ["uni_pc, 1 steps", "low noise: steps 1-1, noise level 0.3821 to 0.0000, CFG 3"]


# Kind of model and number of experts; steps, sampler, shift, CFG of both, boundary.
PUBLISHED = [
    ({"image_model": "qwen_image"}, 1, (50, "euler", None, 4.0, 4.0, 0.875)),
    ({"image_model": "wan2.1"}, 1, (50, "uni_pc", 5.0, 5.0, 4.0, 0.875)),
    ({"image_model": "wan2.1", "out_dim": 48}, 1, (50, "uni_pc", 5.0, 5.0, 4.0, 0.875)),
    ({"image_model": "wan2.1"}, 2, (40, "uni_pc", 12.0, 4.0, 3.0, 0.875)),
    ({"image_model": "wan2.1", "in_dim": 36}, 2, (40, "uni_pc", 5.0, 3.5, 3.5, 0.9)),
    ({"image_model": "wan2.1", "model_type": "animate"}, 1, (20, "uni_pc", 5.0, 1.0, 4.0, 0.875)),
    ({"image_model": "wan2.1", "model_type": "s2v"}, 1, (40, "uni_pc", 3.0, 4.5, 4.0, 0.875)),
]


def test_presets_have_the_published_settings():
    """Of wan/configs, generate.py of Wan 2.1, the model card of Qwen-Image, and lightx2v."""
    from fast_video_vae.nodes.sampling.plan import preset_for

    def values(name, config, count, **given):
        found = preset_for(name, config, {"cfg_high": None, **given}, experts=count)
        firsts = (each[0] for each in (found.shift_high, found.cfg_high, found.cfg_low))
        return found.steps, found.sampler, *firsts, found.boundary

    for config, count, expected in PUBLISHED:
        assert values("base", config, count) == expected
    for name, steps, plain in (("4-step", 4, 0), ("8-step", 8, 0), ("three-phase", 8, 2)):
        config, count, (*_, boundary) = PUBLISHED[3]
        assert values(name, config, count) == (steps, "euler", 5.0, 1.0, 1.0, boundary)
        found = preset_for(name, config, {"cfg_high": None}, experts=2)
        assert (found.scheduler, found.plain_steps, found.plain_cfg) == ("simple", plain, 3.5)
    assert values("4-step", PUBLISHED[0][0], 1, steps=6)[::2] == (6, None, 1.0)


# The first three are steps, the others noise levels; of 4 steps at shift 5, 0.8333333 is one of the
# list, which the first expert serves.
BOUNDARIES = ("0", "2", "40", "0.0", "0.8333333", "auto", None)


def drawn(boundary, draw):
    """Random settings of a run, and the shift and the guidance of each step by `H` and `L`."""
    is_level = "." in (boundary or "")
    steps = 4 if is_level else draw.randint(3, 6)
    high = 5.0 if is_level else draw.choice((3.0, 5.0, 8.0))
    shift = {"H": [high] * steps, "L": [draw.choice((high, 2.0))] * steps}
    cfg = {part: [draw.choice((1.0, 2.0, 3.5)) for _ in range(steps)] for part in "HL"}
    start = draw.choice((0, 1))
    given = {
        "steps": steps,
        "denoise": 1.0 if is_level else draw.choice((1.0, 0.6)),
        "start_at_step": start,
        "end_at_step": draw.choice((10000, draw.randint(start + 1, steps))),
        "add_noise": draw.choice(("enable", "disable")),
        "return_with_leftover_noise": draw.choice(("enable", "disable")),
        "plain_steps": draw.choice((0, 2)),
        "latent_image": {"samples": torch.randn(1, 16, 3, 8, 8)},
    }
    return given, shift, cfg


def text(values, own, draw):
    """A value for each step as a text: one, one for each step of an expert, or all."""
    mine = [values[step] for step in own] or values
    mine = mine[:1] if len({*mine}) == 1 and draw.random() < 0.5 else mine
    return ",".join(f"{value:g}" for value in draw.choice((mine, values)))


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_a_run_equals_its_steps_by_comfyuis_sampler(calls, boundary):
    """A run of ComfyUI's sampler for each step, with the model, levels and guidance of the step."""
    draw = random.Random(f"{boundary} 0")
    given, shift, cfg = drawn(boundary, draw)
    high, low = experts().values()
    file = lora(0)
    models = {"plain": high, "H": core(high, file, 0.8), "L": low}
    levels = {
        part: levels_of(shifted(high, shift[part][0]), given["steps"], given["denoise"])
        for part in "HL"
    }
    is_step = boundary is None or boundary.isdigit()
    point = {None: 10**6, "auto": 0.875}.get(boundary) or float(boundary)
    parts = [
        "H" if (step < point if is_step else level >= point - 1e-6) else "L"
        for step, level in enumerate(levels["H"][:-1])
    ]
    sigmas = [float(levels[part][step]) for step, part in enumerate(parts)] + [0.0]
    start, end = given["start_at_step"], min(given["end_at_step"], given["steps"])
    if given["return_with_leftover_noise"] == "disable":
        sigmas[end] = 0.0
    latent, last = given["latent_image"], None
    for step in range(start, end):
        part = parts[step]
        plain = part == "H" and step < given["plain_steps"]
        noise = step == start and given["add_noise"] == "enable"
        latent, last = custom(
            shifted(models["plain" if plain else part], shift[part][0]),
            sigmas[step : step + 2], latent, cfg=cfg[part][step], noise=noise,
        )  # fmt: skip
    expected = calls[:]
    calls.clear()
    for name, part in (("high", "H"), ("low", "L")):
        own = [step for step, each in enumerate(parts) if each == part]
        given[f"cfg_{name}"] = text(cfg[part], own, draw)
        given[f"shift_{name}"] = text(shift[part], range(given["steps"]), draw)
    given |= {"boundary": boundary or "auto", "loras_high": stack(file, 0.8)}
    result = run(**given, **({"model_low": None} if boundary is None else {}))
    assert calls == expected
    assert result["sigmas"].tolist() == pytest.approx(sigmas[start : end + 1])
    assert relative_error(result["LATENT"]["samples"], latent["samples"]) < ROUNDING
    assert relative_error(result["denoised"]["samples"], last["samples"]) < ROUNDING


@pytest.mark.parametrize(
    ("kind", "denoise"),
    [("wan21-t2v", 0.5), ("qwen-image", 1.0), ("wan22-5b", 1.0)],  # 0.5: of a latent with a mask
)
def test_one_expert_of_any_kind_equals_ksampler(kind, denoise):
    model, latent = expert(kind), empty(kind)
    if denoise < 1:
        latent = {"samples": torch.randn(1, 16, 3, 8, 8), "noise_mask": torch.ones(1, 1, 3, 8, 8)}
        latent["noise_mask"][..., :4] = 0
        latent["batch_index"] = [2]  # as from a node that picks it from a batch
    if "wan" in model.model.model_config.unet_config["image_model"]:
        model = shifted(model, 5.0)  # the shift of the preset; other models keep their own
    same = {"denoise": denoise, "steps": 3}
    expected = ksampler(model, kind, cfg=3.0, latent=latent, **same)
    given = {"model_low": None, "shift_high": "auto", "cfg_high": "3"}
    result = samples(kind, latent_image=latent, **given, **same)
    assert relative_error(result, expected) < ROUNDING


# Models of euler_cfg_pp run the negative pass even at CFG 1, through a function that they add.
@pytest.mark.parametrize("sampler", ["uni_pc", "euler_cfg_pp"])
def test_a_multistep_sampler_continues_over_the_switch(sampler):
    """Two experts with equal weights act as one model; two samplers in a row would restart."""
    one = expert()
    expected = ksampler(shifted(one, 5.0), steps=6, sampler=sampler)
    given = {"model_high": one, "model_low": one.clone(), "steps": 6, "sampler_name": sampler}
    assert relative_error(samples(**given, boundary="3"), expected) < ROUNDING


def test_calls_between_steps_use_the_expert_of_their_noise_level(calls):
    run(sampler_name="dpm_2")
    assert all(name == ("H" if sigma >= 0.875 else "L") for name, sigma, _ in calls)
    assert len({sigma for _, sigma, _ in calls}) > 4
    assert {name for name, *_ in calls} == {"H", "L"}


def test_given_noise_levels_are_used_unchanged(calls):
    given = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
    before = given.clone()
    result = run(sigmas=given, sampler_name="uni_pc")
    assert torch.equal(result["sigmas"], given)
    assert torch.equal(given, before)  # this solver writes its last level into the list
    assert [name for name, *_ in calls] == ["H", "H", "L", "L"]


def test_a_run_without_steps_returns_the_latent(calls):
    latent = {"samples": torch.randn(1, 16, 3, 8, 8)}
    for given in ({"denoise": 0.0}, {"start_at_step": 4}, {"start_at_step": 2, "end_at_step": 2}):
        for more in ({}, {"model_low": None}):
            result = run(latent_image=latent, **given, **more)
            assert result["LATENT"]["samples"] is latent["samples"]
    assert not calls


def test_loras_of_each_expert_equal_comfyuis_loader():
    files, models = [lora(seed) for seed in (0, 1)], experts()
    high, low = (
        core(shifted(model, 5.0), file, 0.8)
        for model, file in zip(models.values(), files, strict=True)
    )
    given = {"loras_high": stack(files[0], 0.8), "loras_low": stack(files[1], 0.8)}
    result, expected = samples(**given), in_two(high, low)
    assert relative_error(result, expected) < ROUNDING
    assert relative_error(samples(**given, lora_mode="merged"), expected) < ROUNDING
    # One stack for both, whose strengths say which is whose, by Apply LoRA.
    both = stack(files[1], "0;0.8", before=stack(files[0], "0.8;0"))
    applied = {name: apply(model, both)[0] for name, model in models.items()}
    assert relative_error(samples(**applied), result) < ROUNDING


def test_a_list_of_strengths_is_spread_over_the_steps_of_its_phase():
    file = lora(1)
    listed = samples(steps=6, boundary="2", loras_low=stack(file, "0;0.9,0.3"))
    # By hand: the steps 2, 3 at 0.9 and 4, 5 at 0.3, as windows of the run.
    parts = stack(file, "0.3@0.6666-1", before=stack(file, "0.9@0.3333-0.6666"))
    assert relative_error(samples(steps=6, boundary="2", loras_low=parts), listed) < ROUNDING


def test_a_shift_is_above_0_and_a_step_counts_within_its_phase():
    from fast_video_vae.nodes.host.run_phase import Phase
    from fast_video_vae.nodes.sampling.plan import parse_text

    for text in ("5, 0", "-1"):
        with pytest.raises(ValueError, match=r"shift_low: got .*; expected a shift above 0"):
            parse_text("shift_low", text)
    assert parse_text("cfg_low", "0") == (0.0,)
    assert [Phase(1, 2, 3, 4).step(step) for step in (0, 3, 5, 6, 9)] == [0, 0, 2, 3, 3]
    assert Phase(1, 2, 3, 0).step(3) is None
