"""Signals that end the command line; no partial file is left behind.

The first SIGINT, SIGTERM or SIGHUP raises `Stopped` in the main thread, so that files are closed
and removed on the way out. Later ones are ignored, because they would interrupt the removal. Python
runs no handler during a long call into C, and ignores errors raised in a destructor; so a thread
receives each signal too, and ends the process after `GRACE_S`.

A file that is about to take its final name is complete: from then on (`before_naming`) signals are
ignored and the command succeeds.
"""

import contextlib
import os
import signal
import socket
import threading
from types import FrameType

from ..media.atomic_file import before_naming, remove_unfinished

# SIGBREAK exists on Windows only, for Ctrl-Break and a closed console.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
# Less than the 10 s that docker waits before SIGKILL, more than an encoder takes for a piece.
GRACE_S = 8.0


class Stopped(KeyboardInterrupt):
    """A signal, by its number, ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Handles signals as a context manager, and restores the previous handlers.

    Ignored signals stay ignored, such as SIGHUP under `nohup`. Outside of the main thread nothing
    changes, because Python allows handlers only there.
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
        self._heard, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="fast-video-vae-signals")
        self._thread.daemon = True
        self._thread.start()
        self._former = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        before_naming.append(self.settle)
        for name in NAMES:
            number = getattr(signal, name, None)
            # None: a handler that is not Python's and cannot be restored.
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
        self._wakeup.close()
        self._thread.join()
        self._heard.close()

    def settle(self) -> None:
        """Ignore signals from now on."""
        self._settled = True

    def check(self) -> None:
        """Raise `Stopped` if a signal arrived, as another error may have replaced it."""
        if self._number is not None:
            raise Stopped(self._number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._settled or self._number is not None:
            return
        self._number = number
        raise Stopped(number)

    def _watch(self) -> None:
        """Wait for a signal, then for the end of the command, in a thread."""
        while heard := self._heard.recv(1):
            if heard[0] in self._previous:
                if not self._over.wait(GRACE_S):
                    remove_unfinished()
                    with contextlib.suppress(OSError):
                        os.write(2, f"fast-video-vae: {reason(heard[0])}\n".encode())
                    os._exit(128 + heard[0])
                return


def reason(number: int) -> str:
    """Describe the end of a command by signal `number`."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
