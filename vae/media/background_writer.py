"""Frames from the device to a writer thread, so that neither waits for the other.

While the thread encodes one piece, the device computes the next. Frames on a CUDA device are copied
into pinned memory on a separate stream, without a wait on either side.
"""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Timeout of a wait in seconds; on Windows a wait without a timeout blocks signals.
TICK_S = 0.1


class _Piece(NamedTuple):
    """Frames in a buffer of the ring, and the event that marks the end of their copy."""

    buffer: Tensor
    shape: torch.Size
    copied: torch.cuda.Event | None


class BackgroundWriter:
    """Passes pieces of frames to `write` in a thread, in order, at most `depth` at a time.

    Use it as a context manager. A piece is copied before `put` returns, or by the device in stream
    order, so the caller may reuse its memory at once. `write` gets a view of a buffer that is
    reused: it must not keep it.

    An error of `write` is raised by the next `put`, or at the end. If the body raises, waiting
    pieces are dropped and the thread ends after the current piece.
    """

    def __init__(self, write: Callable[[Tensor], None], depth: int = 2) -> None:
        """Prepare; the thread starts when the context is entered.

        Args:
            write: Called with `[T, H, W, C]` uint8 on the CPU, such as `VideoWriter.write`.
            depth: Most pieces that are copied, waiting or being written.

        Raises:
            ValueError: `depth` is less than 1.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}; expected at least 1")
        self._write = write
        self._free: queue.Queue[Tensor | None] = queue.Queue()
        self._filled: queue.Queue[_Piece | None] = queue.Queue()
        for _ in range(depth):
            self._free.put(None)  # a buffer without memory yet
        self._error: BaseException | None = None
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="fast-video-vae-writer")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> "BackgroundWriter":
        try:
            self._thread.start()
        except BaseException:
            # After a signal here `__exit__` does not run, and Python would wait for the thread.
            self._filled.put(None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stopped.set()
        self._filled.put(None)
        try:
            self._join()
        finally:
            self._free, self._filled = queue.Queue(), queue.Queue()
            self._streams.clear()
        if kind is None:
            self._raise()

    def put(self, frames: Tensor) -> None:
        """Queue frames for writing; waits while `depth` pieces are queued.

        Args:
            frames: `[T, H, W, C]` uint8 on any device, in any memory layout.

        Raises:
            ValueError: The frames are not uint8.
            RuntimeError: It is called outside of the `with` block.
            BaseException: An error of `write`.
        """
        if frames.dtype != torch.uint8:
            raise ValueError(f"frames are {frames.dtype}; expected torch.uint8")
        buffer = self._next_buffer()
        try:
            # Buffers outlive the caller's inference mode, and inference tensors cannot be written
            # later.
            with torch.inference_mode(False), torch.no_grad():
                if buffer is None or buffer.numel() < frames.numel():
                    buffer = _host_buffer(frames.numel(), pinned=frames.is_cuda)
                copied = self._copy(frames, buffer[: frames.numel()].view(frames.shape))
        except BaseException:
            self._free.put(buffer)
            raise
        self._filled.put(_Piece(buffer, frames.shape, copied))

    def _next_buffer(self) -> Tensor | None:
        """Wait for a free buffer; raises the error of the thread if there is one."""
        while True:
            self._raise()
            if self._thread.ident is None or self._ended.is_set():
                raise RuntimeError("the writer thread is not running; expected `put` within `with`")
            try:
                return self._free.get(timeout=TICK_S)
            except queue.Empty:
                continue

    def _copy(self, frames: Tensor, target: Tensor) -> torch.cuda.Event | None:
        if not frames.is_cuda:
            target.copy_(frames)
            return None
        device = frames.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        # The next kernel may overwrite the memory of `frames`, as a CUDA graph does. A copy on the
        # device is 1000 times as fast as waiting for the one to the host.
        held = frames.clone(memory_format=torch.contiguous_format)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(held, non_blocking=True)
            held.record_stream(side)
            copied = torch.cuda.Event(blocking=True)  # sleeps, where the default would spin
            copied.record(side)
        return copied

    def _work(self) -> None:
        while (piece := self._filled.get()) is not None:
            try:
                if piece.copied is not None:
                    piece.copied.synchronize()
                if self._error is None and not self._stopped.is_set():
                    self._write(piece.buffer[: piece.shape.numel()].view(piece.shape))
            except BaseException as error:
                self._error = error  # raised by the next `put`
            finally:
                self._free.put(piece.buffer)
        self._ended.set()

    def _join(self) -> None:
        """Wait for the thread, also after an interrupt: it must not write to a removed file."""
        interrupt: BaseException | None = None
        while True:
            # Not Thread.join: before Python 3.13 it treats the thread as ended after an interrupt.
            try:
                if self._ended.wait(TICK_S):
                    break
            except BaseException as error:
                self._stopped.set()
                interrupt = error
        self._thread.join()
        if interrupt is not None:
            raise interrupt

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _host_buffer(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            # The system limits pinned memory. Copies then block the device; the result is the same.
            pass
    return torch.empty(size, dtype=torch.uint8)
