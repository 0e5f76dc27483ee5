"""One thread that prepares while the user does something else: builds, checks, measurements.

Nothing waits for it but a caller that asks to. What it has not finished is served by the library.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch

from ..errors import first_line, is_out_of_memory, log_once

_logger = logging.getLogger(__name__)

# Seconds until work that found too little memory is tried again.
_LATER_S = 30.0

# Seconds that the end of the process waits for the work at hand, because threads that Python stops
# inside a compiler can end the process with an error.
_END_S = 10.0


class Ended(Exception):  # noqa: N818, not an error
    """The process ends, so that the work is given up."""


class Job:
    """Work for the thread, with a name for messages; `failed`: it ended by an error."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.work, self.failed = name, work, False
        self._ended = threading.Event()
        self.wait = self._ended.wait  # takes seconds, and returns whether the work has ended
        self.skip = self._ended.set  # ends the work without doing it

    @property
    def is_done(self) -> bool:
        """Whether the work has ended, by an error too."""
        return self._ended.is_set()

    def run(self) -> bool:
        """Do the work; return False if memory was short, so that it has to be done later."""
        try:
            with torch.no_grad():
                self.work()
        except Ended:
            return True
        except Exception as error:
            if is_out_of_memory(error):
                _logger.debug("%s waits for memory", self.name)
                return False
            _logger.debug("%s failed", self.name, exc_info=True)
            self.failed = True
            log_once(f"{self.name} failed ({first_line(error)[:80]}); PyTorch runs instead")
        self.skip()
        return True


# A job that has nothing to do.
DONE = Job("nothing", lambda: None)
DONE.skip()

_lock = threading.Lock()
_queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_ends = False


def submit(name: str, work: Callable[[], object]) -> Job:
    """Let the thread do some work after all that was submitted before."""
    # It is called once without gradients; again later where it raises that memory is short.
    return queue_up(Job(name, work))


def queue_up(job: Job) -> Job:
    """Let the thread do a job after all that was submitted before."""
    global _thread
    _queue.put(job)
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_serve, name="kernels of fast-video-vae", daemon=True)
            _thread.start()
            atexit.register(_end)
    return job


def wait(jobs: Iterable[Job], timeout_s: float | None = None) -> bool:
    """Wait for `jobs`; return whether all ended within `timeout_s` seconds together."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return all(job.wait(None if end is None else max(0, end - time.monotonic())) for job in jobs)


def check() -> None:
    """Raise `Ended` in work that waits for a long time, if the process ends."""
    if _ends:
        raise Ended


def is_here() -> bool:
    """Return whether the caller is the thread."""
    return threading.current_thread() is _thread


def _serve() -> None:
    while not _ends:
        job = _queue.get()
        if not _ends and not job.run():
            later = threading.Timer(_LATER_S, _queue.put, [job])
            later.daemon = True
            later.start()


def _end() -> None:
    global _ends
    _ends = True
    _queue.put(DONE)  # wakes the thread
    if _thread is not None:
        _thread.join(_END_S)
