"""Signals that end the command line; no partial file is left behind.

The first SIGINT, SIGTERM or SIGHUP raises `KeyboardInterrupt` in the main thread, so that files are
closed and removed on the way out. A second one removes the files and ends the process: an error
that was raised in a destructor is lost. A file that is about to take its final name is complete:
from then on (`before_naming`) signals are ignored and the command succeeds.
"""

import contextlib
import os
import signal
import threading
from types import FrameType

from ..media.atomic_file import before_naming, remove_unfinished

# SIGBREAK exists on Windows only, for Ctrl-Break and a closed console.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


class Signals(contextlib.ExitStack):
    """Handles signals until its exit, which restores the previous handlers.

    Ignored signals stay ignored, such as SIGHUP under `nohup`. Outside of the main thread nothing
    changes, because Python allows handlers only there.
    """

    number: int | None = None  # of the signal that ends the command; 0: none does from now on

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        before_naming.append(self.settle)
        self.callback(before_naming.remove, self.settle)
        for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
            # None: a handler that is not Python's and cannot be restored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self.callback(signal.signal, number, signal.signal(number, self._handle))
        self.callback(self.settle)
        return self

    def settle(self) -> None:
        """Ignore signals from now on."""
        self.number = self.number or 0

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt
        if self.number:
            remove_unfinished()
            with contextlib.suppress(OSError):
                os.write(2, f"fast-video-vae: {reason(number)}\n".encode())
            os._exit(128 + number)


def reason(number: int) -> str:
    """Describe the end of a command by signal `number`."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
