"""What ComfyUI's nodes save of a model with LoRAs: its weights with the LoRAs merged into them."""

import functools
import weakref
from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from .holder import KEY
from .merged import merge

_METHOD = "state_dict_for_saving"


def save_with_loras(model: ModelPatcher) -> None:
    """Make ComfyUI's nodes save `model` and its clones with their LoRAs."""
    _override(model)
    model.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    model.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, _override_clone)


def save_without_loras(model: ModelPatcher) -> None:
    """Undo `save_with_loras` for `model`, but not for its clones."""
    model.__dict__.pop(_METHOD, None)
    model.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)


def _override_clone(_: ModelPatcher, clone: ModelPatcher) -> None:
    _override(clone)


def _override(model: ModelPatcher) -> None:
    # A reference to the model itself would keep it until the next garbage collection.
    model.__dict__[_METHOD] = functools.partial(_state_dict, weakref.ref(model))


def _state_dict(
    reference: "weakref.ref[ModelPatcher]",
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Return the state dict of a model for a file; the arguments are those of ComfyUI."""
    model = reference()
    assert model is not None, "the method of a patcher is called on that patcher"
    loras = model.get_attachment(KEY)
    merged = model.clone()
    merged.remove_attachments(KEY)
    merged.remove_additional_models(KEY)
    save_without_loras(merged)
    try:
        for entry, phase in loras.parts if loras else ():
            merged, _ = merge(merged, [entry], phase or 0)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ValueError(
            f"the LoRAs of Apply LoRA (Fast) cannot be saved with the model: {reason}; save the "
            "model without them"
        ) from None
    comfy.model_management.load_models_gpu([merged])
    return merged.state_dict_for_saving(*args, **kwargs)
