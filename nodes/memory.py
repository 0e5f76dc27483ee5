"""What to do when memory runs out, and where memory that stays is made."""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import comfy
import comfy.model_management
import torch

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def first_that_fits(device: torch.device, task: str, ways: list[Callable[[], _Result]]) -> _Result:
    """Go from one way to the next while memory runs out; before each, all models are unloaded.

    Args:
        device: Where the work is done.
        task: What it is called in the log.
        ways: The ways, the best first.

    Returns:
        What the first way that fits returns.

    Raises:
        Exception: What a way raises that is not about memory, and whatever the last one raises.
    """
    with comfy.model_management.cuda_device_context(device):
        for way in ways[:-1]:
            try:
                return way()
            except Exception as error:
                comfy.model_management.raise_non_oom(error)
            # Out of the except block, because the error holds the tensors of its frames.
            _logger.warning(
                "Fast Video VAE: memory ran out in %s; trying again in a smaller way", task
            )
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
        return ways[-1]()


def give_back(device: torch.device) -> None:
    """Return what `malloc` keeps of freed activations to the system, after work on a CPU.

    glibc keeps the free memory below its topmost block: 300 of 600 MiB after the decode of a video.

    Args:
        device: Where the work was done.
    """
    trim = _malloc_trim()
    if device.type == "cpu" and trim is not None:
        trim(0)


def kept() -> contextlib.AbstractContextManager[object]:
    """Memory that outlives the call is not of the graph that a newer ComfyUI may be recording."""
    prefetch = getattr(comfy, "model_prefetch", None)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return contextlib.nullcontext() if pause is None else pause()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of glibc; None where another library is the system's."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows has no library without a name
        return None
