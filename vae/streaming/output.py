"""Destination of decoded frames: new tensors or buffers of the caller, whole or in tiles.

Pixels in channels (the patches of Wan 2.2, the phases of 2x decoders) are rearranged in the same
pass.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from ...kernels import frames_to_images, lacks, pixel_shuffle_3d
from ..background_writer import BackgroundWriter
from ..layers.workspace import uint16_as_int16
from ..models.config import VAEConfig
from ..models.patchify import COLUMN_FIRST, ROW_FIRST
from ..models.receptive_field import Span
from .overflow import Finding, Watch
from .part import OPEN_END, Part


class Output:
    """Takes the output of the last layer in order of time, and returns it as pieces."""

    def __init__(
        self,
        config: VAEConfig,
        dtype: torch.dtype,
        out: Tensor | None = None,
        images: Tensor | None = None,
        part: Part | None = None,
        attempt: Callable[[Callable[[], Any]], Any] = lambda do: do(),
        writer: BackgroundWriter | None = None,
        watch: Watch | None = None,
    ) -> None:
        if out is not None and images is not None:
            raise ValueError("both out and images are given; expected one of them")
        self._config, self._dtype = config, dtype
        # `[B, C, T, H, W]`, or `[B, T, H, W, C]` of floats in [0, 1], uint8 or uint16; from
        # `part.origin` on.
        self._out, self._images = out, images
        self._wanted, self._at, self._origin = None, 0, 0
        if part is not None:
            self._wanted, self._at, self._origin = part.frames, part.first_frame, part.origin
        self._attempt, self._writer, self._watch = attempt, writer, watch
        # Pixels of a piece per pixel of the network's output, in height and width.
        self._size = config.patch_size * config.output_scale
        self._order = COLUMN_FIRST if config.patch_size > 1 else ROW_FIRST

    @property
    def error(self) -> BaseException | None:
        """The error of the writer, or None."""
        return None if self._writer is None else self._writer.error

    def end_after(self, frames: int) -> None:
        """Drop all that comes after the next `frames` frames."""
        wanted = range(OPEN_END) if self._wanted is None else self._wanted
        start, stop = wanted.start, wanted.stop
        self._wanted = range(start, max(start, min(stop, self._at + frames)))

    def write(self, x: Tensor) -> Tensor:
        """Take frames `x` `[B, C, n, H, W]`, and return the piece of the wanted ones."""
        skipped, place = self._passed(x.shape[2])  # before anything that may be repeated
        x = x[:, :, skipped : skipped + place.stop - place.start]
        finding = self._finding(place)
        if finding is not None:
            self._attempt(functools.partial(finding.look, x))
        target = self._target(place)
        write = self._new
        if target is not None:
            write = functools.partial(self._placed, target=target, finding=finding)
        return self._attempt(functools.partial(write, x))

    def chunk(self, latent: Tensor, *, first: bool) -> "TiledChunk":
        """Return a target for tiles of the frames of a `latent` `[B, C, t, h, w]`."""
        batch, channels, _, height, width = self._config.decoded_shape(latent.shape)
        count = 1 if first else latent.shape[2] * self._config.temporal_compression
        skipped, place = self._passed(count)
        piece = self._target(place)
        if piece is None:
            empty = functools.partial(
                torch.empty,
                (batch, channels, place.stop - place.start, height, width),
                dtype=self._dtype,
                device=latent.device,
                memory_format=torch.channels_last_3d,
            )
            piece = self._attempt(empty)
        finding = self._finding(place)
        return TiledChunk(self, piece, finding, skipped, place.stop - place.start)

    def put(
        self,
        x: Tensor,
        piece: Tensor,
        finding: Finding | None,
        time: slice,
        rows: Span,
        columns: Span,
        attempt: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        """Write a part `[B, C, n, h, w]` of some frames to its place in a piece, and examine it."""
        settles = attempt is not None
        attempt = attempt or self._attempt
        down, across = (slice(self._size * a, self._size * b) for a, b in (rows, columns))
        if self._images is None:
            target = piece[:, :, time, down, across]
        else:
            target = piece[:, time, down, across]
        if finding is not None:
            attempt(functools.partial(finding.look, x))
        attempt(functools.partial(self._placed, x, target, finding=finding, settles=settles))

    def settle(self) -> None:
        """Wait until what this thread has put with an `attempt` has left its device."""
        if self._writer is not None:
            self._writer.settle()

    def _finding(self, place: slice) -> Finding | None:
        """Return the examination of a piece; None for one without frames, which is not yielded."""
        return self._watch.next_piece() if self._watch and place.stop > place.start else None

    def _passed(self, frames: int) -> tuple[int, slice]:
        """Count frames; return how many of them precede the wanted ones, and the place of these."""
        at, self._at = self._at, self._at + frames
        if self._wanted is None:
            return 0, slice(at, at + frames)
        first = min(max(at, self._wanted.start), at + frames)
        last = max(first, min(at + frames, self._wanted.stop))
        # Before the first wanted frame the place is empty, at the start.
        place = max(0, first - self._origin)
        return first - at, slice(place, place + last - first)

    def _target(self, place: slice) -> Tensor | None:
        """Return the caller's memory for some frames; None: a new tensor."""
        if self._images is not None:
            return self._images[:, place]
        return None if self._out is None else self._out[:, :, place]

    def _new(self, x: Tensor) -> Tensor:
        frames = x.to(self._dtype)
        if self._size == 1:
            return frames
        return pixel_shuffle_3d(frames, (1, self._size, self._size), self._order)

    def _placed(
        self, x: Tensor, target: Tensor, *, finding: Finding | None, settles: bool = False
    ) -> Tensor:
        if self._writer is not None and target.numel():
            held = uint16_as_int16(self._converted(x, target))
            number = None if finding is None else finding.number()
            self._writer.put(held, uint16_as_int16(target), settles=settles, number=number)
            if finding is not None:
                finding.sent()
            return target
        with torch.inference_mode(target.is_inference()):  # otherwise it cannot be written to
            if not target.numel():
                return target
            if self._images is not None:
                return frames_to_images(x, patch=self._size, order=self._order, out=target)
            return pixel_shuffle_3d(x, (1, self._size, self._size), self._order, out=target)

    def _converted(self, x: Tensor, target: Tensor) -> Tensor:
        """Return `x` in the shape and dtype of `target` `[...]`, on the device of `x`."""
        # A dtype that the device lacks is that of the copy on the host. No device lacks an integer
        # dtype: one without uint16 writes its bits as int16.
        dtype = torch.float32 if lacks(x.device, target.dtype) else target.dtype
        if self._images is None:
            return self._new(x).to(dtype)
        images = frames_to_images(x, dtype=dtype, patch=self._size, order=self._order)
        return images.view(target.shape)


class TiledChunk:
    """Frames that arrive in tiles."""

    def __init__(
        self, output: Output, piece: Tensor, finding: Finding | None, skipped: int, frames: int
    ) -> None:
        self.piece = piece
        self._output, self._finding = output, finding
        self._skipped, self._frames = skipped, frames

    def restart(self) -> None:
        """Expect all tiles, again if some have arrived."""
        if self._finding is not None:
            self._finding.restart()

    def put(
        self,
        x: Tensor,
        start: int,
        rows: Span,
        columns: Span,
        attempt: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        """Write a part of the frames from `start` on; threads of devices may do so at once."""
        first = max(0, self._skipped - start)
        last = min(x.shape[2], self._skipped + self._frames - start)
        if first < last:
            time = slice(start + first - self._skipped, start + last - self._skipped)
            run = x[:, :, first:last]
            self._output.put(run, self.piece, self._finding, time, rows, columns, attempt)

    def settle(self) -> None:
        """Wait as `Output.settle`."""
        self._output.settle()


def until_complete(
    stream: Iterator[Tensor], frames: range | None, *, as_images: bool
) -> Generator[Tensor, None, None]:
    """Yield pieces that hold frames until all `frames` have arrived; else a `ValueError`."""
    missing = OPEN_END if frames is None else len(frames)
    for piece in stream:
        count = piece.shape[1 if as_images else 2]
        if count:
            missing -= count
            yield piece
        if not missing:
            return
    if frames is not None and frames.stop != OPEN_END:
        raise ValueError(
            f"frames are {frames!r}; the video ends before frame {frames.stop - missing}; "
            "expected a part of the video"
        )


def background_writer(device: torch.device, target: Tensor | None) -> BackgroundWriter | None:
    """Return a writer for pieces that go from `device` to `target` on the host, or None."""
    if target is None or device.type == "cpu" or target.device.type != "cpu":
        return None
    return BackgroundWriter(_fill, dtype=None)


def delivered(
    stream: Iterator[Tensor], writer: BackgroundWriter | None, *, ahead: bool
) -> Generator[Tensor, None, None]:
    """Yield the pieces when `writer` has written them; `ahead`: one late, after the next one."""
    waiting: deque[tuple[int, Tensor]] = deque()

    def complete() -> Tensor:
        queued, piece = waiting.popleft()
        if writer is not None:
            writer.wait(queued)
        return piece

    with writer or contextlib.nullcontext():
        for piece in stream:
            waiting.append((writer.queued if writer else 0, piece))
            if len(waiting) > ahead:
                yield complete()
        if waiting:
            yield complete()


def _fill(frames: Tensor, target: Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(frames)
