"""What to do where memory runs out outside of the steps of a video, and the error in one line."""

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from ...kernels import is_out_of_memory, release_cached

_Result = TypeVar("_Result")

# How allocators name the size of a failed allocation.
_WANTED = re.compile(r"allocate ([\d.]+ ?\w+)")
_REASON_LENGTH = 120


class ExhaustedError(torch.OutOfMemoryError):
    """Memory ran out and nothing is left to release; the message is one line."""


def exhausted(error: BaseException, task: str) -> ExhaustedError:
    """Return the one-line error for an `error` of the allocator in a `task`, such as "a decode"."""
    if isinstance(error, ExhaustedError):
        return error
    text = " ".join(str(error).split())
    wanted = _WANTED.search(text)
    reason = f"{wanted[1]} more were needed" if wanted else text[:_REASON_LENGTH]
    return ExhaustedError(
        f"memory ran out in {task}"
        f"{f' ({reason})' if reason else ''}; use smaller tiles, frames or chunks"
    )


def retried(
    do: Callable[[], _Result],
    device: torch.device,
    task: str,
    release: Callable[[torch.device], object] | None = None,
) -> _Result:
    """Run an allocation on a device outside of a video, and once more if memory runs out.

    Before that `release` frees memory of the caller. An `ExhaustedError` of one line about `task`,
    such as "a decode", is raised if memory runs out again.
    """
    try:
        return do()
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, ExhaustedError):
            raise
        bare(error)
    make_room(device, release)
    try:
        return do()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise exhausted(error, task) from None


def make_room(device: torch.device, release: Callable[[torch.device], object] | None) -> None:
    """Release memory of the caller on a device, if there is any, then what PyTorch keeps there."""
    if release is not None:
        release(device)
    release_cached(device)


def bare(error: Exception) -> Exception:
    """Return `error` without the tracebacks, whose frames hold tensors."""
    seen: BaseException | None = error
    while seen is not None:
        before = seen.__cause__ or seen.__context__
        seen.__traceback__ = seen.__cause__ = seen.__context__ = None
        seen = before
    return error
