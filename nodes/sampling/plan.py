"""The plan of a run, from a preset: the model and the guidance for each noise level.

Wan 2.2 has two experts. The expert for high noise handles calls whose time, 1000 times sigma, is at
least the boundary (wan/text2video.py, `_prepare_model_for_timestep`); so calls between two steps,
made by solvers with several stages, have an expert too.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..host.lazy import Later
from ..host.run_phase import Phase
from ..host.widgets import AUTO

lora = Later("lora")

# Relative. A boundary of 0.9 is 0.89999998 as a sigma in float32, whose eps is 6e-8. A level at the
# boundary belongs to the first expert.
_ROUNDING = 1e-6

Sigmas = tuple[float, ...]

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


@dataclass(frozen=True)
class SamplingStage:
    """The part of a run that one model handles."""

    name: str
    expert: int
    plain: bool  # runs without LoRAs, except those that name this phase
    floor: float  # it handles noise levels from this one up, after the stages before it
    cfg: tuple[float, ...]  # for each step of the whole list


@dataclass(frozen=True)
class SamplingPlan:
    """The plan of a run: all noise levels, falling, and the steps from `start` to `end`."""

    sigmas: Sigmas
    stages: tuple[SamplingStage, ...]
    start: int
    end: int
    leftover: bool  # keep the noise at the end of a run that ends early

    @property
    def run(self) -> Sigmas:
        """The noise levels of the run; empty: there is nothing to do."""
        part = self.sigmas[self.start : self.end + 1]
        if self.end < len(self.sigmas) - 1 and not self.leftover:
            part = (*part[:-1], 0.0)
        return part if len(part) > 1 else ()

    def stage_at(self, sigma: float) -> int:
        """Return the number of the stage that handles noise level `sigma`."""
        last = len(self.stages) - 1
        return next((n for n, stage in enumerate(self.stages) if sigma >= stage.floor), last)

    def cfg_at(self, stage: int, sigma: float) -> float:
        """Return the guidance for a call of `stage` at `sigma`."""
        return self.stages[stage].cfg[lora.step_of(sigma, self.sigmas)]

    def phase(self, stage: int) -> Phase:
        """Return the phase of `stage` for its LoRAs."""
        steps = [n for n, sigma in enumerate(self.run[:-1]) if self.stage_at(sigma) == stage]
        return Phase(stage, len(self.stages), steps[0] if steps else 0, len(steps))

    def guidance(self, stage: int) -> list[float]:
        """Return the different values of the guidance in the steps of `stage`, in order."""
        phase = self.phase(stage)
        levels = self.run[phase.first : phase.first + phase.steps]
        return [*dict.fromkeys(self.cfg_at(stage, level) for level in levels)]


def parse_text(name: str, text: str) -> tuple[float, ...] | float | None:
    """Parse the text of an input, numbers for the steps or the boundary; None: `auto`."""
    if text.strip().lower() in ("", AUTO):
        return None
    if name == "boundary":
        return _parse_boundary(text.strip().lower())
    values = [lora.parse_number(piece) for piece in text.split(",")]
    if None in values:
        raise ValueError(
            f"{name}: got {text!r}; expected a number, numbers with commas, or '{AUTO}'"
        )
    for value in values if name.startswith("shift") else ():
        if value <= 0:
            raise ValueError(f"{name}: got {value:g}; expected a shift above 0")
    return tuple(values)


def blend(lists: Callable[[float | None], Sigmas], preset: Preset, *, experts: int) -> Sigmas:
    """Return one list of noise levels, each step with the shift of its expert."""
    first = _shifted_steps("shift_high", preset.shift_high, lists)
    if experts == 1:
        return first
    second = _shifted_steps("shift_low", preset.shift_low or preset.shift_high, lists)
    count, floor = _switch(first, preset.boundary)
    sigmas = (*first[:count], *second[count:])
    if 0 < count < len(sigmas) - 1:
        met, at = sigmas[count], f"shift_low: step {count} starts at noise level"
        if met >= sigmas[count - 1]:
            raise ValueError(f"{at} {met:.4f}, not below that of the step before; expected less")
        if not isinstance(preset.boundary, int) and met >= floor:
            raise ValueError(
                f"{at} {met:.4f}, not below the boundary {preset.boundary:g}; expected a smaller "
                "shift, or a step as the boundary"
            )
    return sigmas


def make_stages(sigmas: Sigmas, preset: Preset, *, experts: int) -> tuple[SamplingStage, ...]:
    """Return the stages of a run of one or two experts, for the whole list of noise levels."""
    steps = len(sigmas) - 1
    count, floor = _switch(sigmas, preset.boundary) if experts == 2 else (steps, 0.0)
    plain = min(preset.plain_steps, count)
    high = _for_steps("cfg_high", preset.cfg_high, 0, count, steps)
    stages = [SamplingStage("high noise" if experts == 2 else "denoise", 0, False, floor, high)]
    if plain:
        known = high if preset.plain_cfg is None else (preset.plain_cfg,) * steps
        above = max(_above(sigmas, plain), floor)
        stages.insert(0, SamplingStage("without LoRA", 0, True, above, known))
    if experts == 2:
        low = _for_steps("cfg_low", preset.cfg_low, count, steps - count, steps)
        stages.append(SamplingStage("low noise", 1, False, 0.0, low))
    return tuple(stages)


def _parse_boundary(text: str) -> float | int:
    """Parse a noise level with a decimal point, or a step as a whole number."""
    value = lora.parse_number(text)
    if value is not None and value == int(value) >= 0 and not set(text) & {".", "e"}:
        return int(value)
    if value is None or not 0 <= value <= 1:
        raise ValueError(
            f"boundary: got {text!r}; expected '{AUTO}', a noise level from 0.0 to 1.0, or the "
            "first step of the second model, such as 2"
        )
    return value


def _switch(sigmas: Sigmas, boundary: float | int) -> tuple[int, float]:
    """Return the first step of the second expert, and the lowest noise level of the first."""
    if not isinstance(boundary, int):
        floor = boundary * (1 - _ROUNDING)
    else:
        floor = math.inf if boundary == 0 else _above(sigmas, boundary)
    steps = len(sigmas) - 1
    return next((n for n, sigma in enumerate(sigmas[:-1]) if sigma < floor), steps), floor


def _above(sigmas: Sigmas, step: int) -> float:
    """Return a noise level just above that of a step; 0 for the end of the list."""
    return sigmas[step] * (1 + lora.SIGMA_TOLERANCE) if step < len(sigmas) - 1 else 0.0


def _shifted_steps(
    name: str, shifts: Sequence[float | None], lists: Callable[[float | None], Sigmas]
) -> Sigmas:
    known = {shift: lists(shift) for shift in shifts}
    steps = len(known[shifts[0]]) - 1
    if len(shifts) == 1:
        return known[shifts[0]]
    if len(shifts) != steps:
        raise ValueError(f"{name}: {len(shifts)} values; expected 1 or {steps}, one for each step")
    sigmas = (*(known[shift][step] for step, shift in enumerate(shifts)), known[shifts[-1]][-1])
    for step, (level, following) in enumerate(itertools.pairwise(sigmas)):
        if following >= level:
            raise ValueError(
                f"{name}: step {step + 1} starts at noise level {following:.4f}; expected "
                f"less than {level:.4f}, the level of the step before"
            )
    return sigmas


def _for_steps(
    name: str, values: Sequence[float], first: int, count: int, steps: int
) -> tuple[float, ...]:
    """Return values for all steps of the list from one value, from `count`, or from all."""
    if len(values) == 1:
        return (values[0],) * steps
    if len(values) == steps:
        return tuple(values)
    if len(values) == count:
        after = steps - first - count
        return (values[0],) * first + tuple(values) + (values[-1],) * after
    own = f", {count} for its steps" if count not in (0, 1, steps) else ""
    raise ValueError(f"{name}: {len(values)} values; expected 1{own} or {steps} for all steps")


# Steps, shift, guidance and boundary of `base` are those of the published models: Wan 2.2
# (wan/configs/wan_{t2v,i2v,animate,s2v}_*.py, wan_ti2v_5B.py), Wan 2.1 (generate.py), Qwen-Image
# (model card). Those with four and eight steps are for the distilled LoRAs of lightx2v: shift 5 and
# no guidance.
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
