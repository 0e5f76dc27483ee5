"""The patchers by which ComfyUI loads the bank of a model's LoRAs, and the banks of several GPUs.

The holder of a bank is of the kind of the model: for a dynamic model (DynamicVRAM) a dynamic one.
One other patcher in a list of models to load makes ComfyUI free memory by estimates, and unload
dynamic models that it leaves alone otherwise.
"""

from collections.abc import Callable
from typing import Any

import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher

from ...lora import Bank

KEY = "fast_video_vae.lora"


def holder_of(bank: Bank, model: ModelPatcher) -> ModelPatcher:
    """Return a patcher that loads a bank with a model; those of one bank have a common parent."""
    # ComfyUI warns of loaded models without a live patcher.
    known = model.load_device, model.offload_device, not model.is_dynamic()
    if known not in bank.companions:
        holder = _patcher(lambda: bank, *known)
        # ComfyUI makes the additional models of another GPU by this call.
        holder.cached_patcher_init = _patcher, (bank.copy, *known[:-1])
        bank.companions[known] = holder
    return bank.companions[known].clone()  # type: ignore[attr-defined]


def _patcher(
    bank: Callable[[], Bank],
    load_device: torch.device,
    offload_device: torch.device,
    disable_dynamic: bool = False,  # the name of ComfyUI
) -> ModelPatcher:
    kind = ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    return kind(bank(), load_device=load_device, offload_device=offload_device)


def holders(patcher: Any) -> list[ModelPatcher]:  # noqa: ANN401 - a patcher, or None
    """Return the patchers of a model's banks; none if the bank stays on the host."""
    return [] if patcher is None else patcher.get_additional_models_with_key(KEY)


def follow(patcher: Any) -> None:  # noqa: ANN401 - a patcher, or None
    """Give a model that was moved to another device, or made static, a holder of its kind."""
    for holder in holders(patcher):
        theirs = patcher.load_device, patcher.is_dynamic()
        if (holder.load_device, holder.is_dynamic()) != theirs:
            patcher.set_additional_models(KEY, [holder_of(holder.model, patcher)])


def give_back(holder: ModelPatcher) -> None:
    """Free the device memory of a dynamic bank: ComfyUI expects to take it at any time."""
    if holder.is_dynamic():
        holder.partially_unload(holder.offload_device, 1e32)
