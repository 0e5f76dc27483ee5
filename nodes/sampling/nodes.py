"""The sampler node: one or two experts in one run."""

from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

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
            description="Samples with both experts of Wan 2.2 in one run: the noise level of each "
            "step says which one is called, and the second is loaded when the first is done. Takes "
            "any other MODEL too, as one expert. Shift, guidance and LoRAs for each expert.",
            search_aliases=[
                "ksampler", "sampler", "wan sampler", "wan 2.2", "moe", "two experts",
                "high noise", "low noise", "lightning", "lightx2v", "denoise",
            ],
            inputs=[*_sockets(), *_preset(), *_guidance(), *_range()],
            outputs=[
                io.Latent.Output(display_name="LATENT"),
                io.Latent.Output(
                    display_name="denoised",
                    tooltip="What the last step took for the latent without noise.",
                ),
                io.Sigmas.Output(display_name="sigmas", tooltip="The noise levels of the run."),
                io.String.Output(
                    display_name="report", tooltip="Steps of each expert, and its LoRAs."
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

        def check() -> None:
            plans.parse_shift("shift_high", shift_high or "")
            plans.parse_shift("shift_low", shift_low or "")
            plans.parse_values("cfg_high", cfg_high or "")
            plans.parse_values("cfg_low", cfg_low or "")
            plans.parse_boundary(boundary or "")

        return check_text(check)

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
        start_step: int,
        end_step: int,
        denoise: float,
        add_noise: str,
        leftover_noise: str,
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
            start=start_step,
            end=end_step,
            denoise=denoise,
            add_noise=add_noise == _ENABLE,
            leftover=leftover_noise == _ENABLE,
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
            display_name="model (high noise)",
            tooltip="The only model, or of two experts the one for high noise. It stays as it is.",
        ),
        io.Model.Input(
            "model_low",
            display_name="model (low noise)",
            optional=True,
            tooltip="The expert for low noise, as Wan 2.2 14B has one. It is loaded when the first "
            "has done its steps.",
        ),
        io.Conditioning.Input("positive", tooltip="What to show."),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip="What not to show. Not needed where CFG is 1, which skips it: half the time.",
        ),
        io.Latent.Input("latent_image", tooltip="The latent to begin with, empty or not."),
        LoraStackType.Input(
            "loras_high",
            display_name="LoRAs (high noise)",
            optional=True,
            tooltip="From LoRA Stack (Fast), for the first model. Strengths may name the phases: "
            "1;0 is on in the first expert alone.",
        ),
        LoraStackType.Input(
            "loras_low",
            display_name="LoRAs (low noise)",
            optional=True,
            tooltip="For the second model.",
        ),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="The noise levels themselves. Steps, scheduler and denoise mean nothing then, "
            "and shifts do not change them.",
        ),
    ]


def _preset() -> list[io.Input]:
    return [
        io.Combo.Input(
            "preset",
            options=list(PRESETS),
            default=BASE,
            tooltip="What every auto below stands for. base: as the model was published. 4-step, "
            "8-step: for distilled LoRAs (lightx2v): shift 5, CFG 1, euler. three-phase: 8 steps, "
            "the first two without LoRAs at CFG 3.5, which keeps motion.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Of the noise.",
        ),
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=_MAX_STEPS,
            tooltip="Steps of the whole run, both experts together; each is one call of a model, "
            "two where CFG is not 1. 0: the preset's.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=[AUTO, *comfy.samplers.KSampler.SAMPLERS],
            default=AUTO,
            tooltip="The solver, one for the whole run: its memory of former steps goes over the "
            "switch. auto: the preset's.",
        ),
        io.Combo.Input(
            "scheduler",
            options=[AUTO, *comfy.samplers.KSampler.SCHEDULERS],
            default=AUTO,
            tooltip="How the noise levels are spread. auto: the preset's.",
        ),
    ]


def _guidance() -> list[io.Input]:
    texts = {
        ("cfg_high", "CFG (high noise)"): "Guidance of the first model, or the only one: a number, "
        "or one for each of its steps (or of all steps): 3.5,3.5,1,1. At 1 the negative pass is "
        "left out: half the time. auto: the preset's.",
        ("cfg_low", "CFG (low noise)"): "Likewise for the second model.",
        ("shift_high", "shift (high noise)"): "Pushes the noise levels up: more steps at high "
        "noise. A number, or one for each step of the run. auto: the preset's, for a model that is "
        "not Wan its own.",
        ("shift_low", "shift (low noise)"): "Likewise for the second model. auto: as the first.",
        ("boundary", None): "Where the second model takes over: a noise level from 0.0 to 1.0, "
        "which the first still serves, or the step that the second begins with, such as 2. auto: "
        "0.875, for models with an image 0.9, as published.",
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
            tooltip="First steps of the first model without its LoRAs, but for those whose "
            "strength names three phases. -1: the preset's.",
        ),
        io.Int.Input(
            "start_step", default=0, min=0, max=_MAX_STEPS, advanced=True,
            tooltip="The step to begin with, from 0.",
        ),
        io.Int.Input(
            "end_step", default=_MAX_STEPS, min=0, max=_MAX_STEPS, advanced=True,
            tooltip="The step to end before; more than there are: to the end.",
        ),
        io.Float.Input(
            "denoise", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Below 1 the run has its steps in the last part of the noise levels, and keeps "
            "so much more of the latent.",
        ),
        io.Combo.Input(
            "add_noise", options=[_ENABLE, _DISABLE], default=_ENABLE, advanced=True,
            tooltip="disable: the latent has its noise already, from a run with leftover noise.",
        ),
        io.Combo.Input(
            "leftover_noise", options=[_DISABLE, _ENABLE], default=_DISABLE, advanced=True,
            tooltip="enable: a run that ends early leaves its noise in the latent, for the next.",
        ),
        io.Combo.Input(
            "lora_mode",
            options=[AUTO, "stream", "bypass", "merged"],
            default=AUTO,
            advanced=True,
            tooltip="How the LoRAs are applied, as in Apply LoRA (Fast).",
        ),
        io.Boolean.Input(
            "free_high", display_name="free first model", default=False, advanced=True,
            tooltip="Unload the first model from the device at the switch, before the second is "
            "loaded, instead of as far as ComfyUI finds needed. Saves memory; the next run loads "
            "it again.",
        ),
    ]  # fmt: skip
