"""Threads of devices: each runs the tasks of one device in order, in its own modes."""

import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ....kernels import runtime
from ...background_writer import TICK_S, join
from ..precision import layer_modes

# The default for new threads is global, so only one caller changes it at a time.
_cores = threading.Lock()


class _Task(NamedTuple):
    """A task, the context of its caller, and the thread of the caller."""

    do: Callable[[], object]
    context: contextvars.Context
    user: threading.Thread


_Tasks = queue.Queue[_Task | None]
_Outcomes = queue.Queue[BaseException | None]


class Worker:
    """A thread for the tasks of one device; it starts with the first task."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self._name = device, name
        self._tasks: _Tasks = queue.Queue()
        self._outcomes: _Outcomes = queue.Queue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def give(self, do: Callable[[], object]) -> None:
        """Queue the task `do`; `outcome` has to be called once for each."""
        task = _Task(do, contextvars.copy_context(), threading.current_thread())
        if self._thread is None:
            # The thread does not refer to this object.
            arguments = self.device, self._tasks, self._outcomes, self._ended
            thread = threading.Thread(target=_work, args=arguments, name=self._name)
            # Before it starts: a signal can come between.
            self._thread = thread
            self._tasks.put(task)
            thread.start()
        else:
            self._tasks.put(task)

    def outcome(self) -> BaseException | None:
        """Wait for the oldest task; return its error. A `RuntimeError`: the thread has ended."""
        while True:
            try:
                # On Windows a wait without a timeout blocks signals.
                return self._outcomes.get(timeout=TICK_S)
            except queue.Empty:
                if self._ended.is_set() and self._outcomes.empty():
                    raise RuntimeError(f"the thread of {self.device} has ended") from None

    def end(self) -> None:
        """End the thread after its current task, and wait for it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._tasks.put(None)
        if thread is threading.current_thread() or thread.ident is None:
            return  # the garbage collector closes a dropped stream in the thread itself
        join(thread, self._ended)


def share_cores(workers: Sequence[Worker]) -> None:
    """Divide the cores that the calling thread uses between `workers` on the CPU."""
    # PyTorch sets the number of threads for the thread that asks, and the default of new threads
    # with it, which is restored. Without it some ops of a new thread run on all cores of the
    # machine.
    workers = [worker for worker in workers if worker.device.type == "cpu"]
    if not workers:
        return
    own = torch.get_num_threads()
    share, more = divmod(own, len(workers))
    with _cores:
        try:
            for index, worker in enumerate(workers):
                worker.give(functools.partial(_use_cores, max(1, share + (index < more))))
                error = worker.outcome()
                if error is not None:
                    raise error
        finally:
            torch.set_num_threads(own)


def _use_cores(count: int) -> None:
    """Use `count` cores in this thread."""
    torch.get_num_threads()  # sets the default, which would replace the number later
    torch.set_num_threads(count)


def _work(device: torch.device, tasks: _Tasks, outcomes: _Outcomes, ended: threading.Event) -> None:
    try:
        with _modes(device):
            user: threading.Thread | None = None
            while (task := _next_task(tasks, user)) is not None:
                user, failed = task.user, None
                try:
                    task.context.run(task.do)
                except BaseException as error:  # raised by the caller of `outcome`
                    failed = error
                # What a task refers to is freed before the next one comes.
                del task
                outcomes.put(failed)
                del failed
    except BaseException as error:  # such as a device without a driver
        outcomes.put(error)
    finally:
        ended.set()


def _next_task(tasks: _Tasks, user: threading.Thread | None) -> _Task | None:
    """Wait for a task; None after the last, or when no thread can queue more."""
    while True:
        # At its end Python waits for this thread, also if a stream was dropped midway.
        alive = threading.main_thread().is_alive() or (user is not None and user.is_alive())
        try:
            return tasks.get(timeout=TICK_S)
        except queue.Empty:
            if not alive:
                return None


@contextlib.contextmanager
def _modes(device: torch.device) -> Iterator[None]:
    """Set the modes of a thread: no inference mode, no autograd, no autocast, its own device."""
    here = getattr(runtime(device), "device", None) if device.type != "cpu" else None
    with (
        here(device) if here is not None else contextlib.nullcontext(),
        layer_modes(device),
    ):
        yield
