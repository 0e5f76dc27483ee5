"""The sampler node: one or two experts in one run."""

from functools import partial
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher

from ..host.api import io
from ..host.input_checks import check_text, checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, timing_output
from ..lora.nodes import LoraStackType
from .plan import BASE, PRESETS, parse_text

run, timing = Later("nodes.sampling.run"), Later("nodes.host.timing")

_MAX_STEPS = 10000


class WanSampler(io.ComfyNode):
    """Sample with one model, or with the two experts of Wan 2.2."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="FastVAE_WanSampler",
            display_name="Wan Sampler (Fast)",
            category=CATEGORY,
            description="Samples with both experts of Wan 2.2 in one run: the noise level of "
            "each step selects the expert, and the second expert is loaded when the first is "
            "done. Any other MODEL works as a single expert. Shift, CFG and LoRAs can be set for "
            "each expert.",
            search_aliases=[
                "ksampler", "sampler", "wan sampler", "wan 2.2", "moe", "two experts",
                "high noise", "low noise", "lightning", "lightx2v", "denoise",
            ],
            inputs=_inputs(),
            outputs=[
                io.Latent.Output(display_name="LATENT"),
                io.Latent.Output(
                    display_name="denoised",
                    tooltip="Estimate of the noise-free latent at the last step.",
                ),
                io.Sigmas.Output(display_name="sigmas", tooltip="Noise levels of the run."),
                io.String.Output(
                    display_name="report", tooltip="Text with the steps and LoRAs of each expert."
                ),
                timing_output(),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(
        cls,
        shift_high: str | None = None,
        shift_low: str | None = None,
        cfg_high: str | None = None,
        cfg_low: str | None = None,
        boundary: str | None = None,
    ) -> bool | str:
        """Check the texts before anything runs."""
        texts = _by_name(shift_high, shift_low, cfg_high, cfg_low, boundary)
        parse = {name: partial(parse_text, name, text or "") for name, text in texts.items()}
        return check_text(parse)

    @classmethod
    @checked
    def execute(
        cls,
        model_high: ModelPatcher,
        positive: list,
        latent_image: dict[str, Any],
        preset: str,
        seed: int,
        steps: int,
        sampler_name: str,
        scheduler: str,
        cfg_high: str,
        cfg_low: str,
        shift_high: str,
        shift_low: str,
        boundary: str,
        plain_steps: int,
        start_at_step: int,
        end_at_step: int,
        denoise: float,
        add_noise: str,
        return_with_leftover_noise: str,
        lora_mode: str,
        free_high: bool,
        model_low: ModelPatcher | None = None,
        negative: list | None = None,
        loras_high: tuple = (),
        loras_low: tuple = (),
        sigmas: object = None,
    ) -> io.NodeOutput:
        """Run the sampler."""
        given = {
            "steps": steps or None,
            "plain_steps": None if plain_steps < 0 else plain_steps,
            "sampler": None if sampler_name == AUTO else sampler_name,
            "scheduler": None if scheduler == AUTO else scheduler,
        }
        texts = _by_name(shift_high, shift_low, cfg_high, cfg_low, boundary)
        given |= {name: parse_text(name, text) for name, text in texts.items()}
        leftover = return_with_leftover_noise == _ENABLE
        settings = run.Settings(
            preset, given, sigmas, start_at_step, end_at_step, denoise, add_noise == _ENABLE,
            leftover, seed, lora_mode, free_high,
        )  # fmt: skip
        models = [model_high] if model_low is None else [model_high, model_low]
        if model_low is None and loras_low:
            raise ValueError(
                "loras_low: there is no model_low; expected LoRAs for loras_high alone"
            )
        loras = loras_high, loras_low
        done = run.sample(models, loras, positive, negative, latent_image, settings)
        return io.NodeOutput(*done, timing.text())


def _by_name(*texts: str | None) -> dict[str, str | None]:
    names = "shift_high", "shift_low", "cfg_high", "cfg_low", "boundary"
    return dict(zip(names, texts, strict=True))


_ENABLE, _DISABLE = "enable", "disable"

_TEXTS = {
    "model_high": "Diffusion model to sample with; with two experts, the one for high noise. The "
    "input model is not modified.",
    "model_low": "Expert for low noise, for example of Wan 2.2 14B; loaded after the last step of "
    "the first expert. Not connected: the whole run uses one model.",
    "positive": "Conditioning of the positive prompt.",
    "negative": "Conditioning of the negative prompt. Not needed if CFG is 1, which skips it and "
    "halves the time.",
    "latent_image": "Latent to start from: an empty latent, or an encoded image or video.",
    "loras_high": "LoRAs from LoRA Stack (Fast); with two experts, those for high noise. A "
    "strength such as 1;0 acts in the first expert only.",
    "loras_low": "LoRAs from LoRA Stack (Fast) for the low noise expert.",
    "sigmas": "Noise levels of the run, for example from a scheduler node. Replaces steps, "
    "scheduler and denoise; shift does not change them.",
    "preset": "Meaning of auto in the inputs below. base: settings of the published model. 4-step, "
    "8-step: for distilled LoRAs (lightx2v) with shift 5, CFG 1, euler. three-phase: 8 steps, the "
    "first two without LoRAs at CFG 3.5, for more motion.",
    "seed": "Seed of the noise.",
    "steps": "Number of steps of the whole run, both experts together. Each step is one model "
    "call, or two if CFG is not 1. 0: from the preset.",
    "sampler_name": "Sampler of the whole run; multistep samplers keep their history when the "
    "expert changes. auto: from the preset.",
    "scheduler": "Scheduler, which sets the distribution of the noise levels. auto: from the "
    "preset.",
    "cfg_high": "CFG scale; with two experts, of the high noise one. A number, or one per step of "
    "this expert or of the run: 3.5,3.5,1,1. 1: skips the negative prompt, half the time. auto: "
    "from the preset.",
    "cfg_low": "CFG scale of the low noise expert: a number, or one per step of this expert or of "
    "the run. auto: from the preset. Not used with a single model.",
    "shift_high": "Shift of the noise levels; with two experts, of the high noise one. Higher "
    "values give more steps at high noise. A number, or one per step. auto: from the preset, or "
    "the model's own value if it is not Wan.",
    "shift_low": "Shift of the noise levels of the low noise expert. auto: same as the first "
    "expert. Not used with a single model.",
    "boundary": "Point where the second expert takes over: the lowest noise level of the first "
    "expert (0.0 to 1.0), or the first step of the second (a whole number such as 2). auto: 0.875, "
    "image-to-video models 0.9.",
    "plain_steps": "Number of first steps of the first expert without LoRAs, except LoRAs whose "
    "strength has three phases. -1: from the preset.",
    "start_at_step": "First step of this run, counted from 0. 0: from the start.",
    "end_at_step": "Step at which this run ends; that step is not done. 10000: to the end.",
    "denoise": "Amount of denoising. Below 1, the steps cover only the last part of the noise "
    "levels and keep more of the input latent. 1.0: full noise.",
    "add_noise": "enable: adds noise to the latent. disable: the latent already contains noise, "
    "from a run with leftover noise.",
    "return_with_leftover_noise": "enable: a run that ends early returns the latent with its "
    "remaining noise, for the next sampler. disable: the noise is removed.",
    "lora_mode": "Method of applying the LoRAs, as mode in Apply LoRA (Fast). auto: the faster one "
    "for each layer and call.",
    "free_high": "Unload the first model completely before the second is loaded. Saves memory, but "
    "the next run loads it again. Off: ComfyUI unloads only what it needs to.",
}


def _inputs() -> list[io.Input]:
    known = comfy.samplers.KSampler
    steps = {"min": 0, "max": _MAX_STEPS}
    seeds = {"min": 0, "max": 0xFFFFFFFFFFFFFFFF, "control_after_generate": True}

    def of(
        kind: type, name: str, default: object = None, label: str | None = None, **more: object
    ) -> io.Input:
        more |= {} if default is None else {"default": default}
        return kind.Input(name, display_name=label, tooltip=_TEXTS[name], **more)

    late = partial(of, advanced=True)

    return [
        of(io.Model, "model_high", label="model"),
        of(io.Model, "model_low", label="model (low noise)", optional=True),
        of(io.Conditioning, "positive"),
        of(io.Conditioning, "negative", optional=True),
        of(io.Latent, "latent_image"),
        of(LoraStackType, "loras_high", label="LoRAs", optional=True),
        of(LoraStackType, "loras_low", label="LoRAs (low noise)", optional=True),
        of(io.Sigmas, "sigmas", optional=True),
        of(io.Combo, "preset", BASE, options=list(PRESETS)),
        of(io.Int, "seed", 0, **seeds),
        of(io.Int, "steps", 0, **steps),
        of(io.Combo, "sampler_name", AUTO, options=[AUTO, *known.SAMPLERS]),
        of(io.Combo, "scheduler", AUTO, options=[AUTO, *known.SCHEDULERS]),
        of(io.String, "cfg_high", AUTO, "CFG"),
        of(io.String, "cfg_low", AUTO, "CFG (low noise)"),
        of(io.String, "shift_high", AUTO, "shift"),
        of(io.String, "shift_low", AUTO, "shift (low noise)"),
        of(io.String, "boundary", AUTO),
        late(io.Int, "plain_steps", -1, "steps without LoRA", min=-1, max=_MAX_STEPS),
        late(io.Int, "start_at_step", 0, **steps),
        late(io.Int, "end_at_step", _MAX_STEPS, **steps),
        late(io.Float, "denoise", 1.0, min=0.0, max=1.0, step=0.01),
        late(io.Combo, "add_noise", _ENABLE, options=[_ENABLE, _DISABLE]),
        late(io.Combo, "return_with_leftover_noise", _DISABLE, options=[_DISABLE, _ENABLE]),
        late(io.Combo, "lora_mode", AUTO, options=[AUTO, "stream", "bypass", "merged"]),
        late(io.Boolean, "free_high", False, "free first model"),
    ]
