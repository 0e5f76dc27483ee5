"""LoRAs that ComfyUI merges into the weights of a MODEL when it loads it."""

import uuid
from collections.abc import Callable, Sequence

import torch
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter.base import WeightAdapterBase
from torch import Tensor, nn

from ...lora import (
    LoraFile,
    Pair,
    ScaledFunction,
    StackEntry,
    Target,
    WeightFunction,
    is_plain,
    layer_name,
    rms_of,
    rms_of_pair,
    small_deltas,
)
from .kinds import function_of, targets_of


def merge(
    model: ModelPatcher, stack: Sequence[StackEntry], phase: int | None
) -> tuple[ModelPatcher, str]:
    """Return a clone that gets the LoRAs when it is loaded, and the reports; None: any phase."""
    clone = model.clone()
    targets = targets_of(model)
    reports: list[str] = []
    deltas: list[tuple[float, float | None, torch.dtype]] = []
    known = [str(model.patches_uuid)]
    for entry in stack:
        strength = _constant(entry, phase)
        if not strength:
            continue
        file = LoraFile(entry.path, targets, function_of)
        names = [layer_name(part.target.key) for part in file.entries]
        parts = [*zip(file.entries, map(entry.blocks.factor, names), strict=True)]
        for key in [part.target.key for part, factor in parts if factor]:
            _check_mergeable(key, model.get_model_object(key))
        for part, factor in parts:
            change, amount = file.read(part), strength * factor
            if change is None or not factor:
                continue
            if isinstance(change, Pair):
                rms = abs(amount * change.scale) * rms_of_pair(change.down, change.up)
                weight = model.get_model_object(part.target.key)
                deltas.append((rms, rms_of(weight), weight.dtype))
            _patch(clone, part.target, change, amount)
        reports += file.report.lines()
        known += [*map(str, file.identity), str(strength), str(entry.blocks)]
    # The same LoRAs on the same model are the same weights.
    clone.patches_uuid = uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(known))
    return clone, "\n".join([*reports, *small_deltas(deltas, "merged"), "merged"])


def _patch(model: ModelPatcher, target: Target, change: WeightFunction, strength: float) -> None:
    if target.key.endswith((".weight", ".bias")):
        key = target.key if target.offset is None else target
        model.add_patches({key: MergedFunction(set(), (change,))}, strength)
        return
    # ComfyUI ignores patches of parameters of modules that have submodules.
    value = model.get_model_object(target.key)
    scaled = ScaledFunction(change, strength, target.offset)
    changed = scaled.into_weight(value.detach(), owned=False)
    model.add_object_patch(target.key, nn.Parameter(changed, requires_grad=False))


def _constant(entry: StackEntry, phase: int | None) -> float:
    strength, *others = entry.schedule.values(phase)
    if others:
        raise ValueError(
            f"strength {entry.schedule} changes during a run; expected one number for merged, "
            "or another mode"
        )
    return strength


def _check_mergeable(key: str, weight: Tensor) -> None:
    plain = is_plain(weight)
    if not plain or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        kept = str(weight.dtype).removeprefix("torch.") if plain else type(weight).__name__
        raise ValueError(
            f"{key} is {kept}; merged needs bf16, fp16 or fp32 weights: use stream or bypass"
        )


class MergedFunction(WeightAdapterBase):
    """A function of this pack, in `weights`, as one of ComfyUI's adapters."""

    name = "fast_video_vae"

    def __init__(self, loaded_keys: set[str], weights: tuple[WeightFunction]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self,
        weight: Tensor,
        key: str,
        strength: float,
        strength_model: float,
        offset: object,
        function: Callable[[Tensor], Tensor],
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: object = None,
    ) -> Tensor:
        """Apply the function in the memory of `weight`, unless its shape changes."""
        changed = self.weights[0].apply(weight, strength)
        return weight.copy_(changed) if changed.shape == weight.shape else changed
