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

from .pinned_memory import pinned_memory

# Timeout of a wait in seconds; on Windows a wait without a timeout blocks signals.
TICK_S = 0.1

# Bytes of a number that is copied with the frames.
_NUMBER_BYTES = 4


class _Piece(NamedTuple):
    """Frames in a buffer of the ring, and the event that marks the end of their copy.

    `note` gets the number at the end of the buffer, which was copied with the frames.
    """

    buffer: Tensor
    shape: torch.Size
    dtype: torch.dtype
    copied: torch.cuda.Event | None
    target: tuple[Tensor, ...]
    note: Callable[[float], object] | None

    @property
    def frames(self) -> Tensor:
        """The frames `[T, H, W, C]`, a view of the buffer."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:nbytes].view(self.dtype).view(self.shape)

    @property
    def number(self) -> Tensor:
        """The number `[1]`, float32, a view of the buffer."""
        return self.buffer[-_NUMBER_BYTES:].view(torch.float32)


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
        dtype: torch.dtype | None = torch.uint8,
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare for pieces of `dtype` (None: any); the thread starts on entry of the context.

        If the body raises, `cancel` is called to end a `write` that takes long.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}; expected at least 1")
        self._write, self._dtype, self._cancel = write, dtype, cancel
        self._free: queue.Queue[Tensor | None] = queue.Queue()
        self._filled: queue.Queue[_Piece | None] = queue.Queue()
        for _ in range(depth):
            self._free.put(None)  # a buffer without memory yet
        self._error: BaseException | None = None
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="fast-video-vae-writer")
        self._user = threading.current_thread()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.queued = self._written = 0
        self._progress = threading.Condition()
        self._putting = threading.Lock()  # threads of several devices can put pieces

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
            self._stop()
        self._filled.put(None)
        if threading.current_thread() is self._thread:
            return  # the garbage collector closes a dropped stream here; the thread ends by itself
        try:
            # It must not write to a removed file.
            join(self._thread, self._ended, self._stop)
        finally:
            self._free, self._filled = queue.Queue(), queue.Queue()
            self._streams.clear()
        if kind is None:
            self._raise()

    def _stop(self) -> None:
        self._stopped.set()
        self._cancel()

    @property
    def error(self) -> BaseException | None:
        """The error of `write` or of a copy, or None."""
        return self._error

    def put(
        self,
        frames: Tensor,
        *target: Tensor,
        number: tuple[Tensor, Callable[[float], object]] | None = None,
    ) -> None:
        """Queue frames `[T, H, W, C]` of any device and layout; wait while `depth` are queued.

        `write` also gets `target`. `number` is `[]`, float32, copied with the frames, and what the
        thread passes it to before it writes.
        """
        if self._dtype not in (None, frames.dtype):
            raise ValueError(f"frames are {frames.dtype}; expected {self._dtype}")
        with self._putting:
            self._user = threading.current_thread()
            buffer = self._next_buffer()
            try:
                # Buffers outlive the caller's inference mode, and inference tensors cannot be
                # written later.
                with torch.inference_mode(False), torch.no_grad():
                    size = (-(-frames.nbytes // _NUMBER_BYTES) + 1) * _NUMBER_BYTES
                    if buffer is None or buffer.numel() < size:
                        buffer = _host_buffer(size, pinned=frames.is_cuda)
                    value, note = number or (None, None)
                    piece = _Piece(buffer, frames.shape, frames.dtype, None, target, note)
                    piece = piece._replace(copied=self._copy(frames, value, piece))
            except BaseException:
                self._free.put(buffer)
                raise
            self._filled.put(piece)
            self.queued += 1

    def wait(self, count: int) -> None:
        """Wait until the first `count` queued pieces are written."""
        with self._progress:
            self._raise()
            while self._written < count:
                if self._ended.is_set():
                    raise RuntimeError("the thread is not running; expected a wait within `with`")
                self._progress.wait(TICK_S)
                self._raise()

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

    def _copy(self, frames: Tensor, value: Tensor | None, piece: _Piece) -> torch.cuda.Event | None:
        if not frames.is_cuda:
            piece.frames.copy_(frames)
            if value is not None:
                piece.number.copy_(value)
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
            piece.frames.copy_(held, non_blocking=True)
            held.record_stream(side)
            if value is not None:
                piece.number.copy_(value, non_blocking=True)
                value.record_stream(side)
            copied = torch.cuda.Event(blocking=True)  # sleeps, where the default would spin
            copied.record(side)
        return copied

    def _work(self) -> None:
        while (piece := self._next_piece()) is not None:
            try:
                if piece.copied is not None:
                    piece.copied.synchronize()
                if piece.note is not None:
                    piece.note(piece.number.item())
                if self._error is None and not self._stopped.is_set():
                    self._write(piece.frames, *piece.target)
            except BaseException as error:
                self._error = error  # raised by the next `put`
            finally:
                self._free.put(piece.buffer)
            with self._progress:
                self._written += 1
                self._progress.notify_all()
        self._ended.set()

    def _next_piece(self) -> _Piece | None:
        """Wait for a queued piece; None after the last, or when no thread can queue more."""
        while True:
            # At its end Python waits for this thread, also if a stream was dropped midway.
            left = not (threading.main_thread().is_alive() or self._user.is_alive())
            try:
                return self._filled.get(timeout=TICK_S)
            except queue.Empty:
                if left:
                    return None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def join(
    thread: threading.Thread,
    ended: threading.Event,
    interrupted: Callable[[], object] = lambda: None,
) -> None:
    """Wait for a `thread` that sets `ended`, also after an interrupt, which is raised then."""
    interrupt: BaseException | None = None
    while True:
        # Not Thread.join: before Python 3.13 it treats the thread as ended after an interrupt.
        try:
            if ended.wait(TICK_S):
                break
        except BaseException as error:
            interrupted()
            interrupt = error
    thread.join()
    if interrupt is not None:
        raise interrupt


def _host_buffer(size: int, *, pinned: bool) -> Tensor:
    memory = pinned_memory(size) if pinned else None
    return torch.empty(size, dtype=torch.uint8) if memory is None else memory
