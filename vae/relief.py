"""What is done when memory runs out in the middle of a video, so that nothing is computed twice.

What failed is tried again at once, where it stands: first after all memory that nobody uses is
given back, then with what the convolutions remember on the host. A convolution that still does not
fit goes in smaller pieces (`CausalConv3d`), and at last the layers go on on the CPU. The chunks
that follow are done by a smaller plan.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from .cache import TemporalCache

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# What the errors say that PyTorch, cuDNN and the system raise without a type of their own.
_PHRASES = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


class Relief:
    """Makes room when memory runs out.

    Args:
        device: Where the work is done.
        caches: Gives the caches whose tails can go to the host.
        release: Gives back memory of the caller's, such as other models; None: there is none.
        task: What the work is called in the log.

    Attributes:
        done: What was done so far, in words.
        is_new: Something was done that was not told of.
    """

    def __init__(
        self,
        device: torch.device,
        caches: Callable[[], Iterable["TemporalCache"]],
        release: Callable[[], None] | None,
        task: str,
    ) -> None:
        self.device = device
        self.done: list[str] = []
        self.is_new = False
        self._caches, self._release, self._task = caches, release, task
        self._told = False

    def attempt(self, do: Callable[[], _Result]) -> _Result:
        """Do something that changes nothing before it succeeds, with more and more room.

        Args:
            do: What to do.

        Returns:
            What it returns.

        Raises:
            Exception: What it raises that is not about memory, or the first such error if there
                is no more room to be made.
        """
        first: Exception | None = None
        for room in (None, self._give_back, self._park):
            if room is not None and not room():
                continue
            try:
                return do()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Without the frames that it went through, which hold tensors.
                first = first or error.with_traceback(None)
        if first is None:
            raise RuntimeError("nothing was tried; expected at least one way")
        raise first

    def note(self, what: str) -> None:
        """Remember what was done; once in the log."""
        self.is_new = True
        if what not in self.done:
            self.done.append(what)

    def tell(self, where: str) -> None:
        """Say in one warning what was done; later, at a lower level.

        Args:
            where: How far the work has come, such as "frame 40".
        """
        level = logging.INFO if self._told else logging.WARNING
        self._told, self.is_new = True, False
        _logger.log(
            level,
            "Fast Video VAE: memory ran out in %s at %s, and it goes on: %s",
            self._task,
            where,
            ", ".join(self.done),
        )

    def _give_back(self) -> bool:
        for cache in self._caches():
            cache.workspace.release()
        if self._release is not None:
            self._release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note("unused memory given back")
        return True

    def _park(self) -> bool:
        freed = [cache.park() for cache in self._caches()]
        if not any(freed):
            return False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note("what layers remember is kept on the host")
        return True
