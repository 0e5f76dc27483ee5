"""What the sampler node takes where its widgets say auto: presets, by the kind of model.

Steps, shift, guidance and boundary of `base` are those that the models were published with: Wan 2.2
(wan/configs/wan_{t2v,i2v,animate,s2v}_*.py, wan_ti2v_5B.py), Wan 2.1 (generate.py), Qwen-Image
(model card). Those of four and eight steps are of the distilled LoRAs of lightx2v: shift 5 and no
guidance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BASE, FOUR, EIGHT, THREE_PHASE = "base", "4-step", "8-step", "three-phase"
PRESETS = (BASE, FOUR, EIGHT, THREE_PHASE)


@dataclass(frozen=True)
class Preset:
    """What is taken where nothing is said; guidance is that of the first expert and the second.

    Attributes:
        steps: Of the whole run.
        shift: Of the noise levels towards 1; None: the model's own.
        boundary: The noise level at which the first expert ends; it serves that level too.
        plain_steps: First steps without LoRAs.
        plain_cfg: Guidance of those.
    """

    steps: int = 20
    shift: float | None = None
    cfg_high: float = 4.0
    cfg_low: float = 4.0
    boundary: float = 0.875
    sampler: str = "euler"
    scheduler: str = "simple"
    plain_steps: int = 0
    plain_cfg: float = 3.5


# Kinds of Wan that have an expert for all noise levels, by what ComfyUI calls them.
_ALONE = {
    "animate": Preset(steps=20, shift=5.0, cfg_high=1.0),
    "s2v": Preset(steps=40, shift=3.0, cfg_high=4.5),
}


def preset_for(name: str, unet_config: Mapping[str, Any], *, experts: int) -> Preset:
    """The values of one of `PRESETS` for a model of one or two experts.

    `unet_config` is what ComfyUI has read off the model's file; of a model that is not known `base`
    has the sampler's own defaults.
    """
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
