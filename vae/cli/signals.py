"""How a signal ends the command line: nothing half done is left behind.

The first SIGINT, SIGTERM or SIGHUP raises `Stopped` in the main thread, so that files are closed
and removed on the way out. Later ones change nothing: they would interrupt the removal. Python runs
no handler inside a long call of C, and drops what is raised in a destructor; so a thread hears each
signal too, and ends the process if that has not happened after `GRACE_S`.

A result that is about to take its final name is finished work: from there on (`before_naming`) a
signal comes too late, and the command ends as if there had been none.
"""

import contextlib
import os
import signal
import socket
import threading
from types import FrameType

from ..media.atomic_file import before_naming, remove_unfinished

# SIGBREAK is Windows' own, for Ctrl-Break and a console that is closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
# Less than the 10 s that docker grants before SIGKILL, more than an
# encoder takes for the piece at hand.
GRACE_S = 8.0


class Stopped(KeyboardInterrupt):
    """The signal of a number ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Handles the signals as a context manager, and puts the handlers of before back.

    What is ignored stays so, as SIGHUP under `nohup`. In a thread other than the main one nothing
    is changed: Python allows handlers there alone.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._settled = False
        self._previous: dict[int, object] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Signals":
        self._handles = threading.current_thread() is threading.main_thread()
        if not self._handles:
            return self
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="fast-video-vae-signals")
        self._thread.daemon = True
        self._thread.start()
        self._former = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        before_naming.append(self.settle)
        for name in NAMES:
            number = getattr(signal, name, None)
            # None is a handler that another language set, which Python cannot put back.
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._settled = True
        if not self._handles:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type], what getsignal gave
        signal.set_wakeup_fd(self._former)
        before_naming.remove(self.settle)
        self._over.set()
        self._told.close()
        self._thread.join()
        self._heard.close()

    def settle(self) -> None:
        """Let no signal end the command any more."""
        self._settled = True

    def check(self) -> None:
        """Raise `Stopped` again where a signal came; another error may have taken its place."""
        if self._number is not None:
            raise Stopped(self._number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._settled or self._number is not None:
            return
        self._number = number
        raise Stopped(number)

    def _watch(self) -> None:
        """Wait for a signal, and then for the end of the command; in a thread of its own."""
        while heard := self._heard.recv(1):
            if heard[0] in self._previous:
                if not self._over.wait(GRACE_S):
                    remove_unfinished()
                    with contextlib.suppress(OSError):
                        os.write(2, f"fast-video-vae: {reason(heard[0])}\n".encode())
                    os._exit(128 + heard[0])
                return


def reason(number: int) -> str:
    """What to say of a command that a signal has ended."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
