"""Frames from the device to a writer thread, so that neither waits for the other.

While the thread encodes one piece, the device computes the next. Frames on a CUDA device are copied
into pinned memory on a separate stream, without a wait on either side.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .pinned_memory import pinned_memory

# Timeout of a wait in seconds; on Windows a wait without a timeout blocks signals.
TICK_S = 0.1


class BackgroundWriter:
    """Passes pieces of frames to `write` in a thread, in order, at most `depth` at a time.

    Use it as a context manager. A piece is copied before `put` returns, or by the device in stream
    order, so the caller may reuse its memory at once. `write` gets a view of a buffer that is
    reused: it must not keep it.

    An error of `write` or of a copy is raised by the next `put` or `wait`, or at the end. If the
    body raises, waiting pieces are dropped and the thread ends after the current piece.
    """

    def __init__(
        self,
        write: Callable[..., None],
        depth: int = 2,
        dtype: torch.dtype | None = torch.uint8,  # of all pieces; None: any
        cancel: Callable[[], None] = lambda: None,  # ends a `write` that takes long
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; expected at least 1")
        self._write, self._dtype, self._cancel = write, dtype, cancel
        self._free: queue.Queue[Tensor | None] = queue.Queue()
        # Per piece its buffer, its frames, the event after their copy, and the target.
        self._filled: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        for _ in range(depth):
            self._free.put(None)  # a buffer without memory yet
        self._is_open = self._is_stopped = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fast-video-vae-writer")
        self._user = threading.current_thread()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._putting = threading.Lock()  # threads of several devices can put pieces
        self.error: BaseException | None = None  # of `write` or of a copy
        self.queued = self._written = 0
        self._progress = threading.Condition()

    def __enter__(self) -> "BackgroundWriter":
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if kind is not None:
            self._is_stopped = True
            self._cancel()
        self._filled.put(None)
        if threading.current_thread() is self._thread:
            return  # the garbage collector closes a dropped stream here; the thread ends by itself
        if self._thread.ident is not None:
            self._join()
        self._free = queue.Queue()  # without the memory of the buffers
        if kind is None:
            self._raise()

    def put(self, frames: Tensor, *target: Tensor) -> None:
        """Queue frames `[T, H, W, C]`, and a target for `write`; wait while `depth` are queued."""
        if self._dtype not in (None, frames.dtype):
            raise ValueError(f"frames are {frames.dtype}; expected {self._dtype}")
        with self._putting:
            self._user = threading.current_thread()
            buffer = self._next_buffer()
            try:
                # Buffers outlive the caller's inference mode, out of which theirs are read-only.
                with torch.inference_mode(False), torch.no_grad():
                    size = frames.nbytes
                    if buffer is None or buffer.numel() < size:
                        pinned = pinned_memory(size) if frames.is_cuda else None
                        buffer = torch.empty(size, dtype=torch.uint8) if pinned is None else pinned
                    held = buffer[:size].view(frames.dtype).view(frames.shape)
                    copied = self._copy(frames, held)
            except BaseException:
                self._free.put(buffer)
                raise
            self._filled.put((buffer, held, copied, target))
            self.queued += 1
            if self._thread.ident is None:
                self._thread.start()

    def wait(self, count: int) -> None:
        """Wait until the first `count` queued pieces are written."""
        with self._progress:
            while self._written < count and self.error is None:
                self._progress.wait(TICK_S)
        self._raise()

    def _next_buffer(self) -> Tensor | None:
        """Wait for a free buffer; raises the error of the thread if there is one."""
        while True:
            self._raise()
            if not self._is_open:
                raise RuntimeError("the writer thread is not running; expected `put` within `with`")
            with suppress(queue.Empty):
                return self._free.get(timeout=TICK_S)

    def _copy(self, frames: Tensor, held: Tensor) -> torch.cuda.Event | None:
        if not frames.is_cuda:
            held.copy_(frames)
            return None
        device = frames.device
        side = self._streams.get(device) or torch.cuda.Stream(device)
        self._streams[device] = side
        # The next kernel may overwrite the memory of `frames`, as a CUDA graph does. A copy on the
        # device is 1000 times as fast as waiting for the one to the host.
        kept = frames.clone(memory_format=torch.contiguous_format)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            held.copy_(kept, non_blocking=True)
            kept.record_stream(side)
            copied = torch.cuda.Event(blocking=True)  # sleeps, where the default would spin
            copied.record(side)
        return copied

    def _work(self) -> None:
        for buffer, frames, copied, target in iter(self._next_piece, None):
            try:
                if copied is not None:
                    copied.synchronize()
                if self.error is None and not self._is_stopped:
                    self._write(frames, *target)
            except BaseException as error:
                self.error = error  # raised by the next `put`
            finally:
                self._free.put(buffer)
            with self._progress:
                self._written += 1
                self._progress.notify_all()
        self._ended.set()

    def _next_piece(self) -> tuple[Any, ...] | None:
        """Wait for a queued piece; None after the last, or when no thread can queue more."""
        while True:
            # At its end Python waits for this thread, also if a stream was dropped midway.
            left = not (threading.main_thread().is_alive() or self._user.is_alive())
            with suppress(queue.Empty):
                return self._filled.get(timeout=TICK_S)
            if left:
                return None

    def _join(self) -> None:
        """Wait for the thread, which must not write to a removed file, also after an interrupt."""
        # Not Thread.join: before Python 3.13 it treats the thread as ended after an interrupt.
        try:
            while not self._ended.wait(TICK_S):
                pass
        except BaseException:
            self._is_stopped = True
            self._cancel()
            self._join()
            raise
        self._thread.join()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
