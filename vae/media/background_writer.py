"""Frames from the device to a writer in a thread of its own, so that neither waits for the other.

While a thread encodes one piece, the device computes the next. Frames on a CUDA device are copied
on a stream of their own into pinned memory, which needs no wait on either side.
"""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# How long a wait lasts before signals are looked at: on Windows a wait without end hears none.
TICK_S = 0.1


class _Piece(NamedTuple):
    """Frames on their way: their bytes in a buffer of the ring, and what tells that they are."""

    buffer: Tensor
    shape: torch.Size
    copied: torch.cuda.Event | None


class BackgroundWriter:
    """Gives pieces of frames to `write` in a thread, in order, at most `depth` at a time.

    As a context manager. A piece is copied before `put` returns, or by the device in the order of
    its own work, so the caller may reuse its memory at once. `write` gets a view of a buffer that
    is reused too: it must not keep it.

    An error of `write` is raised by the next `put`, or else at the end. If the body raises, pieces
    that wait are dropped and the thread ends with the piece at hand.
    """

    def __init__(self, write: Callable[[Tensor], None], depth: int = 2) -> None:
        """Prepare; the thread starts when the context is entered.

        Args:
            write: Takes `[T, H, W, C]` uint8 on the CPU, such as `VideoWriter.write`.
            depth: Pieces that are copied, waiting or being written at a time.

        Raises:
            ValueError: `depth` is not positive.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}; expected at least 1")
        self._write = write
        self._free: queue.Queue[Tensor | None] = queue.Queue()
        self._filled: queue.Queue[_Piece | None] = queue.Queue()
        for _ in range(depth):
            self._free.put(None)  # a buffer that has no memory yet
        self._error: BaseException | None = None
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="fast-video-vae-writer")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> "BackgroundWriter":
        try:
            self._thread.start()
        except BaseException:
            # A signal: the body and `__exit__` do not run, and Python would wait for the thread.
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
        """Take frames; waits while `depth` pieces are on their way.

        Args:
            frames: `[T, H, W, C]` uint8 on any device, in any memory layout.

        Raises:
            ValueError: The frames are not uint8.
            BaseException: What `write` raised.
        """
        if frames.dtype != torch.uint8:
            raise ValueError(f"frames are {frames.dtype}; expected torch.uint8")
        buffer = self._next_buffer()
        try:
            # Buffers outlive the caller's mode, and tensors made in it cannot be written later.
            with torch.inference_mode(False), torch.no_grad():
                if buffer is None or buffer.numel() < frames.numel():
                    buffer = _host_buffer(frames.numel(), pinned=frames.is_cuda)
                copied = self._copy(frames, buffer[: frames.numel()].view(frames.shape))
        except BaseException:
            self._free.put(buffer)
            raise
        self._filled.put(_Piece(buffer, frames.shape, copied))

    def _next_buffer(self) -> Tensor | None:
        """Wait for a place in the ring; the error of the thread comes instead, if there is one."""
        while True:
            self._raise()
            if self._thread.ident is None or self._ended.is_set():
                raise RuntimeError("the thread does not run; expected `put` inside of `with`")
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
        # The memory of `frames` may be written again by the very next kernel, as a CUDA graph does;
        # a copy on the device is 1000 times as fast as the one that would have to be waited for.
        held = frames.clone(memory_format=torch.contiguous_format)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(held, non_blocking=True)
            held.record_stream(side)
            copied = torch.cuda.Event(blocking=True)  # which sleeps where the default would spin
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
                self._error = error  # for the thread that puts
            finally:
                self._free.put(piece.buffer)
        self._ended.set()

    def _join(self) -> None:
        """Wait for the thread; it is never left behind, to write to a file that is gone."""
        interrupt: BaseException | None = None
        while True:
            # Not Thread.join: before Python 3.13 an interrupt makes it take the thread for ended.
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
            # Systems limit it. Copies wait for the device then, and are as right.
            pass
    return torch.empty(size, dtype=torch.uint8)
