"""What is done when memory runs out in the middle of a video, so that nothing is computed twice.

Everything in a step that allocates runs through `attempt`, which tries it again where it stands:
first after unused memory is given back, then with the tails of the convolutions on the host. So it
must change nothing before it succeeds: memory is allocated first, and tails and residuals are
overwritten by what cannot run out of memory. A convolution that still does not fit is computed in
smaller pieces (`CausalConv3d`). The chunks that follow are done by a smaller plan.
"""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from ...kernels import is_out_of_memory

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# How allocators name the size that they could not give.
_WANTED = re.compile(r"allocate ([\d.]+ ?\w+)")
_REASON_LENGTH = 120


class ExhaustedError(torch.OutOfMemoryError):
    """Memory ran out and nothing is left to give back; the message is one line."""


def exhausted(error: BaseException, task: str) -> ExhaustedError:
    """The one-line error for memory that stays short.

    Args:
        error: What the allocator raised, maybe a paragraph.
        task: What ran out of memory, such as "a decode".
    """
    if isinstance(error, ExhaustedError):
        return error
    text = " ".join(str(error).split())
    wanted = _WANTED.search(text)
    reason = f"{wanted[1]} more were wanted" if wanted else text[:_REASON_LENGTH]
    return ExhaustedError(
        f"memory ran out in {task}, and nothing is left to give back"
        f"{f' ({reason})' if reason else ''}; smaller tiles, frames or chunks take less"
    )


class Relief:
    """Makes room when memory runs out.

    Args:
        device: Where the work is done.
        task: What the work is called in the log and in errors, such as "a decode".
        release: Gives back memory of the caller's, such as other models; None: there is none.

    Attributes:
        frees: Lets go of memory that lies unused in the work, such as `Workspace.release`.
        parks: Brings what the layers remember to the host; returns whether that freed memory.
        done: What was done so far, in words.
        is_new: Something was done that was not logged.
    """

    def __init__(
        self, device: torch.device, task: str, release: Callable[[], None] | None = None
    ) -> None:
        self.device = device
        self.forget()
        self.done: list[str] = []
        self.is_new = False
        self._task, self._release = task, release
        self._logged = False

    def forget(self) -> None:
        """Have nothing to give back, as at first; whom it referred to can be freed."""
        self.frees: Callable[[], object] = lambda: None
        self.parks: Callable[[], bool] = lambda: False

    def attempt(self, do: Callable[[], _Result]) -> _Result:
        """Do something that changes nothing before it succeeds, with more and more room.

        Raises:
            Exception: What it raises that is not about memory, or the first such error if there
                is no more room to be made.
        """
        first: Exception | None = None
        for room in (None, self._give_back, self._park):
            try:
                if room is None or room():
                    return do()
            except Exception as error:
                if not is_out_of_memory(error) or _captures(self.device):
                    raise
                # Without the frames that it went through, which hold tensors.
                first = first or error.with_traceback(None)
        if first is None:
            raise RuntimeError("nothing was tried; expected at least one way")
        raise first

    def finish(self, do: Callable[[], _Result]) -> _Result:
        """`attempt`, as the outermost: memory that stays short raises the one-line error."""
        try:
            return self.attempt(do)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.exhausted(error) from None

    def exhausted(self, error: BaseException) -> ExhaustedError:
        """The one-line error for memory that stays short in this work."""
        return exhausted(error, self._task)

    def note(self, what: str) -> None:
        """Remember what was done; once in the log."""
        self.is_new = True
        if what not in self.done:
            self.done.append(what)

    def report(self, where: str) -> None:
        """Log in one warning what was done by such as "frame 40"; later ones are for debugging."""
        level = logging.DEBUG if self._logged else logging.WARNING
        self._logged, self.is_new = True, False
        _logger.log(
            level,
            "Fast Video VAE: memory ran out in %s at %s, and it goes on: %s",
            self._task,
            where,
            ", ".join(self.done),
        )

    def _give_back(self) -> bool:
        self.frees()
        if self._release is not None:
            self._release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note("unused memory given back")
        return True

    def _park(self) -> bool:
        if not self.parks():
            return False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note("what layers remember is kept on the host")
        return True


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, which nothing may be freed in."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
