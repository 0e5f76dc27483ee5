"""Retries when memory runs out, and allocation of memory that outlives a call."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import comfy
import comfy.model_management
import comfy.model_patcher
import torch

from ...kernels import is_out_of_memory
from ...vae import ExhaustedError, resumed, trim_heap

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def in_turn(
    device: torch.device, task: str, do: Callable[[bool], _T], last: str | None = None
) -> _T:
    """Return the result of work on `device`, which starts again if memory runs out.

    Args:
        device: The device, from which all models are unloaded after a failure.
        task: Name of the work in the log and in errors, such as "a preview".
        do: The work; with True it takes its last way.
        last: That way in words; None: there is none.

    Raises:
        ExhaustedError: Memory ran out each time, or in a part of the work that has tried all.
    """
    ways = ["", "with all models unloaded", *([] if last is None else [last])]

    def settings() -> Iterator[str]:
        for words in ways:
            if words:
                text = "Fast Video VAE: memory ran out in %s; trying again, %s"
                _logger.warning(text, task, words)
                free_others(device)
            yield words

    def run(words: str) -> Iterator[_T]:
        yield do(words == last)

    def failed(error: Exception) -> bool:
        return is_out_of_memory(error) and not isinstance(error, ExhaustedError)

    try:
        with comfy.model_management.cuda_device_context(device):
            (result,) = resumed(settings(), run, failed, task)
            return result
    finally:
        give_back(device)


def free_others(device: torch.device, *patchers: comfy.model_patcher.ModelPatcher) -> None:
    """Unload all models on `device` except `patchers`."""
    management = comfy.model_management
    loaded = management.current_loaded_models
    own = [each for each in loaded if any(each.model is one for one in patchers)]
    management.free_memory(1e30, device, keep_loaded=own)
    with management.cuda_device_context(device):
        management.soft_empty_cache()


def give_back(device: torch.device) -> None:
    """Return freed activations to the system after work on `device`, if that is the CPU."""
    if device.type == "cpu":
        trim_heap()


def kept() -> contextlib.AbstractContextManager[object]:
    """Return a context for memory that outlives the graph that ComfyUI captures."""
    prefetch = getattr(comfy, "model_prefetch", None)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return contextlib.nullcontext() if pause is None else pause()
