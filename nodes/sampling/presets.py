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
    """Values of a preset; those of the first expert hold for a model with one."""

    steps: int = 20
    shift: float | None = None  # of the noise levels towards 1; None: the model's own
    cfg_high: float = 4.0
    cfg_low: float = 4.0
    boundary: float = 0.875  # the lowest noise level of the first expert
    sampler: str = "euler"
    scheduler: str = "simple"
    plain_steps: int = 0  # first steps without LoRAs, with their guidance
    plain_cfg: float = 3.5


# Kinds of Wan with one expert for all noise levels, by ComfyUI's names.
_ALONE = {
    "animate": Preset(steps=20, shift=5.0, cfg_high=1.0),
    "s2v": Preset(steps=40, shift=3.0, cfg_high=4.5),
}


def preset_for(name: str, unet_config: Mapping[str, Any], *, experts: int) -> Preset:
    """Return the values of a preset for a model; an unknown one has the sampler's defaults."""
    base = _published(unet_config, experts)
    if name == BASE:
        return base
    distilled = replace(
        base, steps=4, cfg_high=1.0, cfg_low=1.0, sampler="euler", scheduler="simple"
    )
    if _is_wan(unet_config):
        distilled = replace(distilled, shift=5.0)
    if name == THREE_PHASE:
        return replace(distilled, steps=8, plain_steps=2)
    return replace(distilled, steps=8) if name == EIGHT else distilled


def _published(unet_config: Mapping[str, Any], experts: int) -> Preset:
    if unet_config.get("image_model") == "qwen_image":
        return Preset(steps=50, cfg_high=4.0)
    if not _is_wan(unet_config):
        return Preset()
    kind = unet_config.get("model_type")
    wan = Preset(shift=5.0, sampler="uni_pc")
    if kind in _ALONE:
        return replace(_ALONE[kind], sampler="uni_pc")
    if unet_config.get("out_dim") == 48:
        return replace(wan, steps=50, cfg_high=5.0)
    with_image = unet_config.get("in_dim", 16) > 16
    if experts == 1:
        return replace(wan, steps=40 if with_image else 50, cfg_high=5.0)
    if with_image:
        return replace(wan, steps=40, cfg_high=3.5, cfg_low=3.5, boundary=0.9)
    return replace(wan, steps=40, shift=12.0, cfg_high=4.0, cfg_low=3.0)


def _is_wan(unet_config: Mapping[str, Any]) -> bool:
    return str(unet_config.get("image_model", "")).startswith("wan")
