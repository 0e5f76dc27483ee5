"""What ComfyUI's nodes save of a model with LoRAs: its weights with the LoRAs merged into them."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from .holder import KEY
from .merged import merge

_METHOD = "state_dict_for_saving"


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
    clone.__dict__.pop(_METHOD, None)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    return clone


def _override(model: ModelPatcher) -> None:
    # A reference to the model itself would keep it until the next garbage collection.
    model.__dict__[_METHOD] = functools.partial(_state_dict, weakref.ref(model))


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
