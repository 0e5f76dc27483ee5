"""The LoRAs of each stage of a run."""

from collections.abc import Sequence

from comfy.model_patcher import ModelPatcher

from ...lora import StackEntry
from ..host.error_text import about
from ..lora.apply import KEY, AttachedLoras, LoraMode, apply_lora
from .plan import SamplingPlan


def with_loras(
    models: Sequence[ModelPatcher], stacks: Sequence[tuple], plan: SamplingPlan, mode: LoraMode
) -> tuple[list[ModelPatcher], list[str]]:
    """Return the model of each stage with its LoRAs, and the key reports."""
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
        # A LoRA without phases is not used in the steps without LoRA.
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
