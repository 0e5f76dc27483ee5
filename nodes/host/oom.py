"""Retries when memory runs out, and allocation of memory that outlives a call."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import comfy
import comfy.model_management
import comfy.model_patcher
import torch

from ...kernels import is_out_of_memory
from ...vae import Relief, trim_heap

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Way:
    """A way to run an encode or decode, with its description in the log."""

    words: str
    tile: tuple[int, int] | None = None  # height and width in pixels; None: chosen by the plan
    limit_bytes: int | None = None  # of a step; None: the available memory
    on_host: bool = False

    @property
    def size(self) -> float:
        """Pixels of a tile, or bytes of a step; infinite without a limit."""
        if self.tile is not None:
            return math.prod(self.tile)
        return math.inf if self.limit_bytes is None else self.limit_bytes


def in_turn(
    devices: Sequence[torch.device], task: str, ways: list[Way], go: Callable[[Way], _T]
) -> _T:
    """Return the result of `go` for the first way that fits; each starts from the beginning."""
    try:
        (result,) = resumed(devices, task, ways, lambda way: iter([go(way)]))
        return result
    finally:
        give_back(devices[0])


def resumed(
    devices: Sequence[torch.device],
    task: str,
    ways: list[Way],
    go: Callable[[Way], Iterator[_T]],
    where: Callable[[], str] = str,
) -> Iterator[_T]:
    """Yield the results of `go`; when memory runs out, unload all models and go the next way."""
    first: Exception | None = None
    with comfy.model_management.cuda_device_context(devices[0]):
        for way in ways:
            if first is not None:
                level = logging.WARNING if way is ways[1] else logging.INFO
                _logger.log(
                    level,
                    "Fast Video VAE: memory ran out in %s%s; trying again, %s",
                    task,
                    where(),
                    way.words,
                )
                comfy.model_management.unload_all_models()
                for each in devices:
                    _empty_cache(each)
            try:
                yield from go(way)
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Without the traceback, whose frames hold tensors.
                first = first or error.with_traceback(None)
    raise Relief(devices[0], task).exhausted(first) from None


def free_others(
    patcher: comfy.model_patcher.ModelPatcher,
    device: torch.device,
    *more: comfy.model_patcher.ModelPatcher,
) -> None:
    """Unload all models on `device` except `patcher` and `more`."""
    management, kept_ones = comfy.model_management, (patcher, *more)
    loaded = management.current_loaded_models
    own = [each for each in loaded if any(each.model is one for one in kept_ones)]
    management.free_memory(1e30, device, keep_loaded=own)
    _empty_cache(device)


def give_back(device: torch.device) -> None:
    """Return freed activations to the system after work on `device`, if that is the CPU."""
    if device.type == "cpu":
        trim_heap()


def kept() -> contextlib.AbstractContextManager[object]:
    """Return a context for memory that outlives the graph that ComfyUI captures."""
    prefetch = getattr(comfy, "model_prefetch", None)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return contextlib.nullcontext() if pause is None else pause()


def _empty_cache(device: torch.device) -> None:
    """Return the unused memory of PyTorch's allocator to `device`, after the work there."""
    with comfy.model_management.cuda_device_context(device):
        comfy.model_management.soft_empty_cache()
