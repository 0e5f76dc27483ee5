"""LoRAs of a run over several models: which of them act in which part of it."""

from collections.abc import Sequence

from comfy.model_patcher import ModelPatcher

from ...lora import StackEntry
from ..host.error_text import about
from ..lora.apply import KEY, AttachedLoras, LoraMode, apply_lora
from .plan import SamplingPlan


def with_loras(
    models: Sequence[ModelPatcher], stacks: Sequence[tuple], plan: SamplingPlan, mode: LoraMode
) -> tuple[list[ModelPatcher], list[str]]:
    """The model of each stage, with its LoRAs, and what was found in their files.

    Models and stacks are one for each expert; the models stay as they are.

    Raises:
        ValueError: A file cannot be used or has nothing for its model, or a strength has other
            phases than the run; the message begins with the input's name.
    """
    staged, reports = [], []
    for number, stage in enumerate(plan.stages):
        name = ("loras_high", "loras_low")[stage.expert]
        model, stack = models[stage.expert], stacks[stage.expert] or ()
        applied: AttachedLoras | None = model.get_attachment(KEY)
        for entry, phase in applied.parts if applied else ():
            if phase is None:
                _check_phases(entry, plan, ("model_high", "model_low")[stage.expert])
        for entry in stack:
            _check_phases(entry, plan, name)
        # Without phases of its own a LoRA is not in the plain steps.
        entries = tuple(one for one in stack if len(one.schedule.phases) > 1 or not stage.plain)
        if entries:
            with about(name):
                model, report = apply_lora(model, entries, mode, number)
            reports += [f"{stage.name}: {line}" for line in report.splitlines()]
        staged.append(model)
    return staged, reports


def _check_phases(entry: StackEntry, plan: SamplingPlan, name: str) -> None:
    known, count = entry.schedule.phases, len(plan.stages)
    if len(set(known)) > 1 and len(known) != count:
        raise ValueError(
            f"{name}: strength '{entry.schedule}' has {len(known)} phases, but the run has {count}"
        )
