"""Presets of the sampler node for widgets with "auto", by the kind of model.

Steps, shift, guidance and boundary of `base` are those of the published models: Wan 2.2
(wan/configs/wan_{t2v,i2v,animate,s2v}_*.py, wan_ti2v_5B.py), Wan 2.1 (generate.py), Qwen-Image
(model card). Those with four and eight steps are for the distilled LoRAs of lightx2v: shift 5 and
no guidance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BASE, FOUR, EIGHT, THREE_PHASE = "base", "4-step", "8-step", "three-phase"
PRESETS = (BASE, FOUR, EIGHT, THREE_PHASE)


@dataclass(frozen=True)
class Preset:
    """Values of a preset; a tuple has one value for all steps, or one for each."""

    steps: int = 20
    shift_high: tuple[float | None, ...] = (None,)  # None: the model's own
    shift_low: tuple[float, ...] | None = None  # None: as the first expert
    cfg_high: tuple[float, ...] = (4.0,)  # also of a model with one expert
    cfg_low: tuple[float, ...] = (4.0,)
    boundary: float | int = 0.875  # lowest noise level of the first expert, or step of the second
    sampler: str = "euler"
    scheduler: str = "simple"
    plain_steps: int = 0  # first steps without LoRAs, with their guidance
    plain_cfg: float | None = None  # None: that of the other steps


# Kinds of Wan with one expert for all noise levels, by ComfyUI's names.
_ALONE = {
    "animate": Preset(shift_high=(5.0,), cfg_high=(1.0,), sampler="uni_pc"),
    "s2v": Preset(steps=40, shift_high=(3.0,), cfg_high=(4.5,), sampler="uni_pc"),
}


def preset_for(
    name: str, unet_config: Mapping[str, Any], given: Mapping[str, Any], *, experts: int
) -> Preset:
    """Return the values of a preset for a model, replaced by `given` ones that are not None."""
    preset = _published(unet_config, experts)
    if name != BASE:
        preset = replace(preset, cfg_high=(1.0,), cfg_low=(1.0,), sampler="euler")
        preset = replace(preset, steps=4 if name == FOUR else 8, scheduler="simple")
        if _is_wan(unet_config):
            preset = replace(preset, shift_high=(5.0,))
        if name == THREE_PHASE:
            preset = replace(preset, plain_steps=2)
    # Distilled models need guidance in steps without their LoRA.
    if preset.cfg_high == (1.0,) and given["cfg_high"] is None:
        preset = replace(preset, plain_cfg=3.5)
    return replace(preset, **{key: value for key, value in given.items() if value is not None})


def _published(unet_config: Mapping[str, Any], experts: int) -> Preset:
    if unet_config.get("image_model") == "qwen_image":
        return Preset(steps=50)
    if not _is_wan(unet_config):
        return Preset()
    kind = unet_config.get("model_type")
    if kind in _ALONE:
        return _ALONE[kind]
    wan = Preset(steps=50, shift_high=(5.0,), cfg_high=(5.0,), sampler="uni_pc")
    if unet_config.get("out_dim") == 48:
        return wan
    with_image = unet_config.get("in_dim", 16) > 16
    if experts == 1:
        return replace(wan, steps=40 if with_image else 50)
    if with_image:
        return replace(wan, steps=40, cfg_high=(3.5,), cfg_low=(3.5,), boundary=0.9)
    return replace(wan, steps=40, shift_high=(12.0,), cfg_high=(4.0,), cfg_low=(3.0,))


def _is_wan(unet_config: Mapping[str, Any]) -> bool:
    return str(unet_config.get("image_model", "")).startswith("wan")
