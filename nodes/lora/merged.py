"""LoRAs that ComfyUI merges into the weights of a MODEL when it loads or saves it."""

import functools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
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

KEY = "fast_video_vae.lora"

_SAVES = "state_dict_for_saving"


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
                rms = abs(amount * change.scale) * rms_of_pair(*change.tensors)
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
    changed = scaled.into_weight(value.detach())
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


def save_with_loras(model: ModelPatcher) -> None:
    """Make ComfyUI's nodes save `model` and its clones with their LoRAs."""
    _override(model)
    model.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, lambda _, clone: _override(clone))


def without_loras(model: ModelPatcher) -> ModelPatcher:
    """Return a clone without the LoRAs of this pack; clones of `model` keep theirs."""
    clone = model.clone()
    clone.remove_attachments(KEY)
    clone.remove_additional_models(KEY)
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.OUTER_SAMPLE):
        clone.remove_wrappers_with_key(kind, KEY)
    clone.__dict__.pop(_SAVES, None)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    return clone


def _override(model: ModelPatcher) -> None:
    # A reference to the model itself would keep it until the next garbage collection.
    model.__dict__[_SAVES] = functools.partial(_state_dict, weakref.ref(model))


def _state_dict(reference: Callable[[], Any], *args: object, **kwargs: object) -> dict[str, Any]:
    """Return the state dict of a model for a file; the arguments are those of ComfyUI."""
    model = reference()  # which calls this
    merged = _merged(model)
    # ComfyUI patches each weight when it writes it, so the loaded ones must not have the patches.
    comfy.model_management.unload_model_and_clones(model, all_devices=True)
    merged.patch_model(load_weights=False)  # parameters that are replaced as a whole
    try:
        return merged.state_dict_for_saving(*args, **kwargs)
    finally:
        merged.unpatch_model(unpatch_weights=False)


def _merged(model: ModelPatcher) -> ModelPatcher:
    loras = model.get_attachment(KEY)
    merged = without_loras(model)
    for entry, phase in loras.parts if loras else ():
        try:
            merged, _ = merge(merged, [entry], phase)
        except ValueError as error:
            reason = str(error).partition("; ")[0]
            instead = "merge them into the bf16 model and quantise that"
            if reason.startswith("strength "):
                instead = "set one number, or its phase, to save it"
            raise ValueError(f"LoRAs cannot be saved with the model: {reason}; {instead}") from None
    return merged
