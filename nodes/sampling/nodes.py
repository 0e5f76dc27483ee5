"""The sampler node: one or two experts in one run."""

from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher

from ..host.api import io
from ..host.input_checks import check_text, checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, timing_output
from ..lora.nodes import LoraStackType
from .presets import BASE, PRESETS

plans, run = Later("nodes.sampling.plan"), Later("nodes.sampling.run")
timing = Later("nodes.host.timing")

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
            inputs=[*_sockets(), *_preset(), *_guidance(), *_range()],
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
        return check_text(
            {
                "shift_high": lambda: plans.parse_shift("shift_high", shift_high or ""),
                "shift_low": lambda: plans.parse_shift("shift_low", shift_low or ""),
                "cfg_high": lambda: plans.parse_values("cfg_high", cfg_high or ""),
                "cfg_low": lambda: plans.parse_values("cfg_low", cfg_low or ""),
                "boundary": lambda: plans.parse_boundary(boundary or ""),
            }
        )

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
        settings = run.Settings(
            preset=preset,
            steps=steps,
            shift_high=plans.parse_shift("shift_high", shift_high),
            shift_low=plans.parse_shift("shift_low", shift_low),
            cfg_high=plans.parse_values("cfg_high", cfg_high),
            cfg_low=plans.parse_values("cfg_low", cfg_low),
            boundary=plans.parse_boundary(boundary),
            sampler=sampler_name,
            scheduler=scheduler,
            sigmas=sigmas,
            plain_steps=plain_steps,
            start=start_at_step,
            end=end_at_step,
            denoise=denoise,
            add_noise=add_noise == _ENABLE,
            leftover=return_with_leftover_noise == _ENABLE,
            seed=seed,
            lora_mode=lora_mode,
            free_high=free_high,
        )
        models = [model_high] if model_low is None else [model_high, model_low]
        if model_low is None and loras_low:
            raise ValueError(
                "loras_low: there is no model_low; expected LoRAs for loras_high alone"
            )
        done = run.sample(
            models, (loras_high, loras_low), positive, negative, latent_image, settings
        )
        return io.NodeOutput(done.latent, done.denoised, done.sigmas, done.report, timing.text())


_ENABLE, _DISABLE = "enable", "disable"


def _sockets() -> list[io.Input]:
    return [
        io.Model.Input(
            "model_high",
            display_name="model",
            tooltip="Diffusion model to sample with; with two experts, the one for high noise. "
            "The input model is not modified.",
        ),
        io.Model.Input(
            "model_low",
            display_name="model (low noise)",
            optional=True,
            tooltip="Expert for low noise, for example of Wan 2.2 14B; loaded after the last "
            "step of the first expert. Not connected: the whole run uses one model.",
        ),
        io.Conditioning.Input("positive", tooltip="Conditioning of the positive prompt."),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip="Conditioning of the negative prompt. Not needed if CFG is 1, which skips it "
            "and halves the time.",
        ),
        io.Latent.Input(
            "latent_image",
            tooltip="Latent to start from: an empty latent, or an encoded image or video.",
        ),
        LoraStackType.Input(
            "loras_high",
            display_name="LoRAs",
            optional=True,
            tooltip="LoRAs from LoRA Stack (Fast); with two experts, those for high noise. A "
            "strength such as 1;0 acts in the first expert only.",
        ),
        LoraStackType.Input(
            "loras_low",
            display_name="LoRAs (low noise)",
            optional=True,
            tooltip="LoRAs from LoRA Stack (Fast) for the low noise expert.",
        ),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="Noise levels of the run, for example from a scheduler node. Replaces steps, "
            "scheduler and denoise; shift does not change them.",
        ),
    ]


def _preset() -> list[io.Input]:
    return [
        io.Combo.Input(
            "preset",
            options=list(PRESETS),
            default=BASE,
            tooltip="Meaning of auto in the inputs below. base: settings of the published model. "
            "4-step, 8-step: for distilled LoRAs (lightx2v) with shift 5, CFG 1, euler. "
            "three-phase: 8 steps, the first two without LoRAs at CFG 3.5, for more motion.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Seed of the noise.",
        ),
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=_MAX_STEPS,
            tooltip="Number of steps of the whole run, both experts together. Each step is one "
            "model call, or two if CFG is not 1. 0: from the preset.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=[AUTO, *comfy.samplers.KSampler.SAMPLERS],
            default=AUTO,
            tooltip="Sampler of the whole run; multistep samplers keep their history when the "
            "expert changes. auto: from the preset.",
        ),
        io.Combo.Input(
            "scheduler",
            options=[AUTO, *comfy.samplers.KSampler.SCHEDULERS],
            default=AUTO,
            tooltip="Scheduler, which sets the distribution of the noise levels. auto: from the "
            "preset.",
        ),
    ]


def _guidance() -> list[io.Input]:
    texts = {
        ("cfg_high", "CFG"): "CFG scale; with two experts, of the high noise one. A "
        "number, or one per step of this expert or of the run: 3.5,3.5,1,1. 1: skips the "
        "negative prompt, half the time. auto: from the preset.",
        ("cfg_low", "CFG (low noise)"): "CFG scale of the low noise expert: a number, or one per "
        "step of this expert or of the run. auto: from the preset. Not used with a single model.",
        ("shift_high", "shift"): "Shift of the noise levels; with two experts, of "
        "the high noise one. Higher values give more steps at high noise. A number, or one per "
        "step. auto: from the preset, or the model's own value if it is not Wan.",
        ("shift_low", "shift (low noise)"): "Shift of the noise levels of the low noise expert. "
        "auto: same as the first expert. Not used with a single model.",
        ("boundary", None): "Point where the second expert takes over: the lowest noise level of "
        "the first expert (0.0 to 1.0), or the first step of the second (a whole number such as "
        "2). auto: 0.875, image-to-video models 0.9.",
    }
    return [
        io.String.Input(name, display_name=label, default=AUTO, tooltip=tooltip)
        for (name, label), tooltip in texts.items()
    ]


def _range() -> list[io.Input]:
    return [
        io.Int.Input(
            "plain_steps",
            display_name="steps without LoRA",
            default=-1,
            min=-1,
            max=_MAX_STEPS,
            advanced=True,
            tooltip="Number of first steps of the first expert without LoRAs, except LoRAs whose "
            "strength has three phases. -1: from the preset.",
        ),
        io.Int.Input(
            "start_at_step", default=0, min=0, max=_MAX_STEPS, advanced=True,
            tooltip="First step of this run, counted from 0. 0: from the start.",
        ),
        io.Int.Input(
            "end_at_step", default=_MAX_STEPS, min=0, max=_MAX_STEPS, advanced=True,
            tooltip="Step at which this run ends; that step is not done. 10000: to the end.",
        ),
        io.Float.Input(
            "denoise", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Amount of denoising. Below 1, the steps cover only the last part of the "
            "noise levels and keep more of the input latent. 1.0: full noise.",
        ),
        io.Combo.Input(
            "add_noise", options=[_ENABLE, _DISABLE], default=_ENABLE, advanced=True,
            tooltip="enable: adds noise to the latent. disable: the latent already contains "
            "noise, from a run with leftover noise.",
        ),
        io.Combo.Input(
            "return_with_leftover_noise",
            options=[_DISABLE, _ENABLE],
            default=_DISABLE,
            advanced=True,
            tooltip="enable: a run that ends early returns the latent with its remaining noise, "
            "for the next sampler. disable: the noise is removed.",
        ),
        io.Combo.Input(
            "lora_mode",
            options=[AUTO, "stream", "bypass", "merged"],
            default=AUTO,
            advanced=True,
            tooltip="Method of applying the LoRAs, as mode in Apply LoRA (Fast). auto: the "
            "faster one for each layer and call.",
        ),
        io.Boolean.Input(
            "free_high", display_name="free first model", default=False, advanced=True,
            tooltip="Unload the first model completely before the second is loaded. Saves "
            "memory, but the next run loads it again. Off: ComfyUI unloads only what it needs to.",
        ),
    ]  # fmt: skip
