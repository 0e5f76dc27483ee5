"""A run of the sampler node: from its widgets to a latent."""

import copy
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_sampling
import comfy.nested_tensor
import comfy.sample
import comfy.samplers
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..host.error_text import about
from ..host.latents import first_of, log_cut_patches
from ..host.progress import show_text
from ..lora.apply import KEY, AttachedLoras, LoraMode, apply_lora
from ..preview.live import Callback, playing
from .guider import StagedGuider
from .plan import Preset, SamplingPlan, Sigmas, blend, make_stages, preset_for

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The values of the widgets (see their tooltips)."""

    preset: str
    given: dict[str, Any]  # fields of `Preset`; None: the preset's
    sigmas: Tensor | None
    start: int
    end: int
    denoise: float
    add_noise: bool
    leftover: bool
    seed: int
    lora_mode: LoraMode
    free_high: bool


def sample(
    models: Sequence[ModelPatcher],
    stacks: Sequence[tuple],
    positive: list,
    negative: list | None,
    latent: dict[str, Any],
    settings: Settings,
) -> tuple[dict[str, Any], dict[str, Any], Tensor, str]:
    """Run a sampler over one model or two experts; the inputs are not modified.

    Returns:
        Two LATENTs, the result and the estimate of the last step, the noise levels `[steps + 1]`,
        and lines about stages and LoRAs.
    """
    conds = {"positive": positive} | ({} if negative is None else {"negative": negative})
    for name, conditioning in conds.items():
        if not len(conditioning):
            raise ValueError(f"{name}: the conditioning is empty; expected an encoded prompt")
    image = _checked_latent(models, latent)
    config = getattr(models[0].model.model_config, "unet_config", {})
    preset = preset_for(settings.preset, config, settings.given, experts=len(models))
    shifted, plan = _plan(models, preset, settings)
    used = {cfg for number in range(len(plan.stages)) for cfg in plan.guidance(number)} - {1}
    if used and negative is None:
        raise ValueError(f"negative: not connected, but CFG {max(used):g} needs it; expected CFG 1")
    staged, reports = _with_loras(shifted, stacks, plan, settings.lora_mode)
    report = "\n".join([*_lines(plan, preset), *reports])
    sigmas = torch.tensor(plan.run)
    if not len(sigmas):
        _logger.info("Fast Video VAE: no step to run; the latent is unchanged")
        return latent, latent, sigmas, report
    guider = StagedGuider(staged, plan, conds, free=settings.free_high, on_stage=_show_stage)
    if settings.add_noise:
        noise = comfy.sample.prepare_noise(image, settings.seed, latent.get("batch_index"))
    else:
        noise = comfy.sample.prepare_empty_noise(image)
    seen: dict[str, Tensor] = {}
    with playing(guider.model_patcher, len(plan.run) - 1, seen, image) as show:
        samples = guider.sample(
            noise,
            image,
            comfy.samplers.sampler_object(preset.sampler),
            sigmas.clone(),  # a copy, because a solver may write into it
            denoise_mask=latent.get("noise_mask"),
            callback=_callback(guider, plan, show),
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=settings.seed,
        )
    denoised = _denoised(guider, seen, samples)
    return _latent(latent, samples), _latent(latent, denoised), sigmas, report


def _checked_latent(models: Sequence[ModelPatcher], latent: dict[str, Any]) -> Tensor:
    formats = [model.get_model_object("latent_format") for model in models]
    channels = [each.latent_channels for each in formats]
    if len(set(channels)) > 1:
        raise ValueError(
            f"model_low: its latents have {channels[1]} channels; expected {channels[0]}, as for "
            "model_high"
        )
    ratios = (latent.get(f"downscale_ratio_{kind}") for kind in ("spacial", "temporal"))
    image = comfy.sample.fix_empty_latent_channels(models[0], latent["samples"], *ratios)
    if not image.is_nested and image.shape[1] != channels[0]:
        raise ValueError(
            f"latent_image: got {image.shape[1]} channels; expected {channels[0]} for this model"
        )
    first = first_of(image)
    network = getattr(models[0].model, "diffusion_model", None)
    patch = getattr(network, "patch_size", None)
    if isinstance(patch, int) and getattr(network, "in_channels", None) != channels[0]:
        patch = patch, patch  # otherwise a patch is a latent pixel, as of Lens
    if isinstance(patch, (tuple, list)) and len(patch) > 1 and first.ndim > 3:
        step = formats[0].spacial_downscale_ratio
        log_cut_patches("this model", first.shape[-2:], patch[-2:], step)
    return image


def _plan(
    models: Sequence[ModelPatcher], preset: Preset, settings: Settings
) -> tuple[list[ModelPatcher], SamplingPlan]:
    experts = len(models)
    shifts = preset.shift_high, preset.shift_low or preset.shift_high
    shifted = [
        _shifted(name, model, shift[0])
        for name, model, shift in zip(("shift_high", "shift_low"), models, shifts, strict=False)
    ]
    if settings.sigmas is not None:
        sigmas = _given_sigmas(settings.sigmas)
    else:
        lists = partial(_scheduled, models[0], preset, settings.denoise)
        sigmas = blend(lists, preset, experts=experts)
    stages = make_stages(sigmas, preset, experts=experts)
    end = min(settings.end, max(len(sigmas) - 1, 0))
    return shifted, SamplingPlan(sigmas, stages, min(settings.start, end), end, settings.leftover)


def _scheduled(model: ModelPatcher, preset: Preset, denoise: float, shift: float | None) -> Sigmas:
    """Return the noise levels of a shift, as in ComfyUI's KSampler."""
    known = comfy.samplers.KSampler(
        _shifted("shift_high", model, shift), preset.steps, torch.device("cpu"),
        sampler=preset.sampler, scheduler=preset.scheduler, denoise=denoise,
    )  # fmt: skip
    return tuple(known.sigmas.tolist())


def _shifted(name: str, model: ModelPatcher, shift: float | None) -> ModelPatcher:
    """Return a clone of a model with another shift, or the model itself if the shift is its own."""
    own = model.get_model_object("model_sampling")
    if shift is None or getattr(own, "shift", None) == shift:
        return model
    if not isinstance(own, comfy.model_sampling.ModelSamplingDiscreteFlow):
        kind = type(model.model).__name__
        raise ValueError(f"{name}: {kind} has no shift; expected 'auto'")
    shifted = copy.deepcopy(own)
    shifted.set_parameters(shift=shift, multiplier=own.multiplier)
    clone = model.clone()
    clone.add_object_patch("model_sampling", shifted)
    return clone


def _given_sigmas(sigmas: Tensor) -> Sigmas:
    values = tuple(sigmas.flatten().tolist())
    falling = all(one >= other for one, other in itertools.pairwise(values))
    if not (falling and all(map(math.isfinite, values))):
        raise ValueError(
            "sigmas: the noise levels do not fall; expected finite ones, the highest first"
        )
    return values


def _with_loras(
    models: Sequence[ModelPatcher], stacks: Sequence[tuple], plan: SamplingPlan, mode: LoraMode
) -> tuple[list[ModelPatcher], list[str]]:
    """Return the model of each stage with its LoRAs, and the key reports."""
    staged, reports = [], []
    for number, stage in enumerate(plan.stages):
        part = ("high", "low")[stage.expert]
        model, stack = models[stage.expert], stacks[stage.expert] or ()
        applied: AttachedLoras | None = model.get_attachment(KEY)
        before = [entry for entry, phase in applied.parts if phase is None] if applied else []
        for name, entries in ((f"model_{part}", before), (f"loras_{part}", stack)):
            for schedule in (entry.schedule for entry in entries):
                count = len(schedule.phases)
                if len(set(schedule.phases)) > 1 and count != len(plan.stages):
                    raise ValueError(
                        f"{name}: strength '{schedule}' has {count} phases, but the run has "
                        f"{len(plan.stages)}"
                    )
        # A LoRA without phases is not used in the steps without LoRA.
        entries = tuple(one for one in stack if len(one.schedule.phases) > 1 or not stage.plain)
        if entries:
            with about(f"loras_{part}"):
                model, report = apply_lora(model, entries, mode, number)
            reports += [f"{stage.name}: {line}" for line in report.splitlines()]
        staged.append(model)
    return staged, reports


def _lines(plan: SamplingPlan, preset: Preset) -> list[str]:
    lines = [f"{preset.sampler}, {len(plan.run) - 1 if plan.run else 0} steps"]
    for number, stage in enumerate(plan.stages):
        phase = plan.phase(number)
        if phase.steps:
            end = phase.first + phase.steps
            cfg = ", ".join(f"{value:g}" for value in plan.guidance(number))
            lines.append(
                f"{stage.name}: steps {phase.first + 1}-{end}, noise level "
                f"{plan.run[phase.first]:.4f} to {plan.run[end]:.4f}, CFG {cfg}"
            )
    return lines


def _show_stage(name: str) -> None:
    _logger.info("Fast Video VAE: %s", name)
    show_text(name)


def _callback(guider: StagedGuider, plan: SamplingPlan, show: Callback) -> Callback:
    """Return the function to call after each step: `show` for bar and preview, text, time."""

    def step_done(step: int, x0: Tensor, x: Tensor, total_steps: int) -> None:
        guider.add_time("denoise")
        show(step, x0, x, total_steps)
        show_text(f"{plan.stages[guider.stage].name}: step {step + 1} of {total_steps}")

    return step_done


def _denoised(guider: StagedGuider, seen: dict[str, Tensor], samples: Tensor) -> Tensor:
    if "x0" not in seen:
        return samples
    x0 = seen["x0"]
    if samples.is_nested and not x0.is_nested:
        shapes = [part.shape for part in samples.unbind()]
        x0 = comfy.nested_tensor.NestedTensor(comfy.utils.unpack_latents(x0, shapes))
    return guider.model_patcher.model.process_latent_out(x0.cpu())


def _latent(given: dict[str, Any], samples: Tensor) -> dict[str, Any]:
    gone = ("downscale_ratio_spacial", "downscale_ratio_temporal")
    kept = {name: value for name, value in given.items() if name not in gone}
    device = comfy.model_management.intermediate_device()
    return kept | {"samples": samples.to(device, comfy.model_management.intermediate_dtype())}
