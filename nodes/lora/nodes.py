"""The LoRA nodes: a stack of files, and a model with them."""

import folder_paths
from comfy.model_patcher import ModelPatcher

from ..host.api import io
from ..host.error_text import about
from ..host.input_checks import check_text, checked
from ..host.lazy import Later
from ..host.widgets import CATEGORY

apply, lora = Later("nodes.lora.apply"), Later("lora")

LoraStackType = io.Custom("FASTVAE_LORA_STACK")

_PHASES = {"auto": None, "high": 0, "low": 1}


class LoraStack(io.ComfyNode):
    """Add a LoRA file with its strength to a stack."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_LoraStack",
            display_name="LoRA Stack (Fast)",
            category=CATEGORY,
            description="Adds a LoRA file, with its strength over the run, to a stack for Apply "
            "LoRA (Fast) or Wan Sampler (Fast). Chain several nodes for several LoRAs. Reads "
            "files of kohya, PEFT, diffusers, musubi, lightx2v and LyCORIS.",
            search_aliases=["lora", "load lora", "lora stack", "lora loader", "wan lora"],
            inputs=[
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="LoRA file in models/loras.",
                ),
                io.String.Input(
                    "strength",
                    default="1.0",
                    tooltip="Number, such as 1.0, or list over the steps: 0.9,0.8,0.7. Per "
                    "expert, high noise first: 1;0. Part of the run: 1@0-0.5. Negative values "
                    "and values above 3 are allowed. 0: the file is not loaded.",
                ),
                io.String.Input(
                    "blocks",
                    default="",
                    tooltip="Blocks or layers that the LoRA changes. Empty: all. Block numbers, "
                    "names, exclusions (!) and factors (=): 0-19   self_attn   !cross_attn   "
                    "8-11=0.5",
                ),
                LoraStackType.Input(
                    "stack",
                    optional=True,
                    tooltip="LoRAs from another LoRA Stack (Fast), applied before this one.",
                ),
            ],
            outputs=[LoraStackType.Output(display_name="LORA_STACK")],
        )

    @classmethod
    def validate_inputs(cls, strength: str | None = None, blocks: str | None = None) -> bool | str:
        """Check the texts before anything runs; a linked text is None."""
        return check_text(
            {
                "strength": lambda: strength is None or lora.parse_schedule(strength),
                "blocks": lambda: blocks is None or lora.parse_blocks(blocks),
            }
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_: object) -> object:
        """Return the identity of the file, which changes when it is replaced."""
        path = folder_paths.get_full_path("loras", lora_name)
        try:
            return tuple(lora.identity(path)) if path else lora_name
        except ValueError:
            return lora_name

    @classmethod
    @checked
    def execute(
        cls, lora_name: str, strength: str, blocks: str, stack: tuple = ()
    ) -> io.NodeOutput:
        """Add the file."""
        try:
            path = folder_paths.get_full_path_or_raise("loras", lora_name)
        except FileNotFoundError as error:
            raise ValueError(f"lora_name: {error}") from None
        entry = lora.StackEntry(str(path), lora.parse_schedule(strength), lora.parse_blocks(blocks))
        return io.NodeOutput((*(stack or ()), entry))


class ApplyLora(io.ComfyNode):
    """Apply a stack of LoRAs to a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_ApplyLora",
            display_name="Apply LoRA (Fast)",
            category=CATEGORY,
            description="Applies a stack of LoRAs while the model runs. The model weights, also "
            "quantised ones, are not changed; a new strength or file does not reload the model.",
            search_aliases=["lora", "apply lora", "model lora", "fast lora", "lora bypass"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="Diffusion model. The input model is not "
                    "modified; the weights are shared.",
                ),
                LoraStackType.Input("stack", tooltip="LoRAs from LoRA Stack (Fast)."),
                io.Combo.Input(
                    "mode",
                    options=["auto", "stream", "bypass", "merged"],
                    default="auto",
                    tooltip="auto: the faster method for each layer and call that keeps the "
                    "effect of weak LoRAs. stream: adds the "
                    "LoRA to a copy of the weight; for many tokens. bypass: two small matmuls in "
                    "parallel to the layer; most exact, for few tokens and quantised models. "
                    "merged: writes the LoRA into the weights on loading; not for quantised "
                    "models.",
                ),
                io.Combo.Input(
                    "phase",
                    options=list(_PHASES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="Expert that this model is, for strengths such as 1;0: high or low "
                    "noise. auto: the expert that Wan Sampler (Fast) calls; high in other "
                    "samplers.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls, model: ModelPatcher, stack: tuple, mode: str, phase: str = "auto"
    ) -> io.NodeOutput:
        """Patch a clone."""
        with about("stack"):
            patched, report = apply.apply_lora(model, stack, mode, _PHASES[phase])
        return io.NodeOutput(patched, report)
