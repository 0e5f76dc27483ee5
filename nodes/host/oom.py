"""What to do when memory runs out, and where memory that stays is made."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
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
    """How an encode or decode is tried.

    Attributes:
        words: What it is called in the log.
        tile: Height and width in pixels of exact tiles; None: as the plan has it.
        limit_bytes: Memory that a step may take; None: as there is.
        on_host: On the CPU, whatever the device of the VAE.
    """

    words: str
    tile: tuple[int, int] | None = None
    limit_bytes: int | None = None
    on_host: bool = False

    @property
    def size(self) -> float:
        """Pixels of a tile, or bytes of a step; infinite where there is no limit."""
        if self.tile is not None:
            return math.prod(self.tile)
        return math.inf if self.limit_bytes is None else self.limit_bytes


def in_turn(device: torch.device, task: str, ways: list[Way], go: Callable[[Way], _T]) -> _T:
    """What `go` returns for the first way that fits, from its beginning in each.

    Then memory is given back.

    Raises:
        Exception: What `go` raises that is not about memory.
        torch.OutOfMemoryError: No way fits; one line.
    """
    try:
        (result,) = resumed(device, task, ways, lambda way: iter([go(way)]))
        return result
    finally:
        give_back(device)


def resumed(
    device: torch.device,
    task: str,
    ways: list[Way],
    go: Callable[[Way], Iterator[_T]],
    where: Callable[[], str] = str,
) -> Iterator[_T]:
    """Go from one way to the next while memory runs out; before each, all models are unloaded.

    `go` goes one, from where the one before it stopped. In the log the work is called `task`, and
    `where` says how far it has come, such as " at frame 40". Raises as `in_turn` does.
    """
    first: Exception | None = None
    with comfy.model_management.cuda_device_context(device):
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
                comfy.model_management.soft_empty_cache()
            try:
                yield from go(way)
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Without the frames that it went through, which hold tensors.
                first = first or error.with_traceback(None)
    raise Relief(device, task).exhausted(first) from None


def free_others(
    patcher: comfy.model_patcher.ModelPatcher,
    device: torch.device,
    *more: comfy.model_patcher.ModelPatcher,
) -> None:
    """Unload what other nodes have on a device, but not one model, nor some more."""
    management, kept_ones = comfy.model_management, (patcher, *more)
    loaded = management.current_loaded_models
    own = [each for each in loaded if any(each.model is one for one in kept_ones)]
    management.free_memory(1e30, device, keep_loaded=own)
    management.soft_empty_cache()


def give_back(device: torch.device) -> None:
    """Return what the process keeps of freed activations to the system, after work on a CPU."""
    if device.type == "cpu":
        trim_heap()


def kept() -> contextlib.AbstractContextManager[object]:
    """Memory that outlives the call is not of the graph that a newer ComfyUI may be recording."""
    prefetch = getattr(comfy, "model_prefetch", None)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return contextlib.nullcontext() if pause is None else pause()
