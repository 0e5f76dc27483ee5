"""Recovery from running out of memory within a video, without computing anything twice.

Every allocation of a step runs through `attempt`, which repeats it in place: first after unused
memory is released, then with the tails of the convolutions on the host. So a step must not change
anything before it succeeds: memory is allocated first, and tails and residuals are only overwritten
by operations that do not allocate. A convolution that does not fit even then is computed in smaller
pieces (`CausalConv3d`), and the next chunks follow a smaller plan.
"""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from ...kernels import is_capturing, is_out_of_memory, release_cached

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# How allocators name the size of a failed allocation.
_WANTED = re.compile(r"allocate ([\d.]+ ?\w+)")
_REASON_LENGTH = 120


class ExhaustedError(torch.OutOfMemoryError):
    """Memory ran out and nothing is left to release; the message is one line."""


def exhausted(error: BaseException, task: str) -> ExhaustedError:
    """Return the one-line error for a lack of memory that cannot be resolved."""
    if isinstance(error, ExhaustedError):
        return error
    text = " ".join(str(error).split())
    wanted = _WANTED.search(text)
    reason = f"{wanted[1]} more were needed" if wanted else text[:_REASON_LENGTH]
    return ExhaustedError(
        f"memory ran out in {task}"
        f"{f' ({reason})' if reason else ''}; use smaller tiles, frames or chunks"
    )


class Relief:
    """Frees memory when it runs out.

    Args:
        device: Device of the work.
        task: Name of the work in the log and in errors, such as "a decode".
        release: Releases memory of the caller on a device, such as other models; None: there is
            none.

    Attributes:
        frees: Releases unused memory of the work, such as `Workspace.release`.
        parks: Moves the tails of the layers to the host; returns whether that freed memory.
        done: What was done so far, in words.
        is_new: Something was done that is not logged yet.
    """

    def __init__(
        self,
        device: torch.device,
        task: str,
        release: Callable[[torch.device], None] | None = None,
    ) -> None:
        self.device = device
        self.forget()
        self.done: list[str] = []
        self.is_new = False
        self._task, self._release = task, release
        self._logged = False

    def forget(self) -> None:
        """Reset `frees` and `parks`, so that the objects that they refer to can be freed."""
        self.frees: Callable[[], object] = lambda: None
        self.parks: Callable[[], bool] = lambda: False

    def attempt(self, do: Callable[[], _Result]) -> _Result:
        """Run a step that changes nothing before it succeeds, and free more memory on each failure.

        Args:
            do: The step.

        Returns:
            The result of the step.

        Raises:
            RuntimeError: There was no way to run the step.
            Exception: An error of the step that is not about memory, or the first such error if no
                more memory can be freed.
        """
        first: Exception | None = None
        try:
            for room in (None, self._give_back, self._park):
                try:
                    if room is None or room():
                        return do()
                except Exception as error:
                    if not is_out_of_memory(error) or is_capturing(self.device):
                        raise
                    # Without the traceback, whose frames hold tensors.
                    first = first or error.with_traceback(None)
            if first is None:
                raise RuntimeError("no attempt was made; expected at least one")
            raise first
        finally:
            del first  # an error with a traceback that has this frame would be a reference cycle

    def finish(self, do: Callable[[], _Result]) -> _Result:
        """Run `do` as `attempt`, but raise the one-line error if memory stays short.

        Args:
            do: The step.

        Returns:
            The result of the step.

        Raises:
            ExhaustedError: Memory stays short.
        """
        try:
            return self.attempt(do)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.exhausted(error) from None

    def exhausted(self, error: BaseException) -> ExhaustedError:
        """Return the one-line error for `error` in this work."""
        return exhausted(error, self._task)

    def note(self, what: str) -> None:
        """Record `what` was done; it is logged once."""
        self.is_new = True
        if what not in self.done:
            self.done.append(what)

    def report(self, where: str) -> None:
        """Log what was done at `where`, such as "frame 40": one warning, then debug messages."""
        level = logging.DEBUG if self._logged else logging.WARNING
        self._logged, self.is_new = True, False
        _logger.log(
            level,
            "Fast Video VAE: memory ran out in %s at %s; continuing with: %s",
            self._task,
            where,
            ", ".join(self.done),
        )

    def _give_back(self) -> bool:
        self.frees()
        if self._release is not None:
            self._release(self.device)
        release_cached(self.device)
        self.note("unused memory released")
        return True

    def _park(self) -> bool:
        if not self.parks():
            return False
        release_cached(self.device)
        self.note("tails of the layers kept on the host")
        return True
