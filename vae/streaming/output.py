"""Destinations of the results of a run: latents, or frames in new tensors or in buffers.

Pixels in channels (the patches of Wan 2.2, the phases of 2x decoders) are rearranged in the same
pass. Each piece of a decode is examined by one sum: what overflows becomes infinite, and the next
norm makes it NaN, which nothing in the networks turns into a finite number again.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import frames_to_images, lacks, pixel_shuffle_3d
from ..background_writer import BackgroundWriter
from ..layers.inputs.coding import Coding
from ..layers.workspace import uint16_as_int16
from ..models.config import VAEConfig
from ..models.patchify import COLUMN_FIRST, ROW_FIRST
from ..models.receptive_field import Span
from .source import OPEN_END


class Wanted:
    """Which results of a run are wanted, counted as they come.

    Args:
        wanted: Their numbers.
        at: The number of the first result of the run.
        origin: The number of the first result in the caller's memory.
    """

    def __init__(self, wanted: range = range(OPEN_END), at: int = 0, origin: int = 0) -> None:
        self._wanted, self._at, self._origin = wanted, at, origin

    def end_after(self, count: int) -> None:
        """Drop all that comes after the next `count` results."""
        start, stop = self._wanted.start, self._wanted.stop
        self._wanted = range(start, max(start, min(stop, self._at + count)))

    def passed(self, count: int) -> tuple[int, slice]:
        """Count results; return how many of them precede the wanted ones, and the place of these.

        The place is in the caller's memory; it is empty without a wanted one.
        """
        at, self._at = self._at, self._at + count
        first = min(max(at, self._wanted.start), at + count)
        last = max(first, min(at + count, self._wanted.stop))
        place = max(0, first - self._origin)
        return first - at, slice(place, place + last - first)


class Sink(Protocol):
    """Takes the output of the last layer in order of time."""

    def write(self, x: Tensor) -> Tensor:
        """Take the output `[B, C, n, H, W]`; return the wanted results, which can be none."""
        ...

    def end_after(self, latents: int) -> None:
        """Drop the results after those of the next `latents`."""
        ...


class LatentOutput:
    """The wanted latents of an encode, which `leave` makes of the output of the last layer."""

    def __init__(self, leave: Callable[[Tensor], Tensor], wanted: Wanted) -> None:
        self._leave, self._wanted = leave, wanted

    def write(self, x: Tensor) -> Tensor:
        """Return the latents `[B, C_latent, n, h, w]` of `x` `[B, 2 C_latent, n, h, w]`."""
        skipped, place = self._wanted.passed(x.shape[2])
        x = x[:, :, skipped : skipped + place.stop - place.start]
        return self._leave(x) if x.shape[2] else x

    def end_after(self, latents: int) -> None:
        """Drop what comes after the next `latents`."""
        self._wanted.end_after(latents)


class Finding:
    """The examination of one piece, in parts and from threads of several devices."""

    def __init__(
        self, sides: dict[torch.device, torch.cuda.Stream], coding: Coding | None = None
    ) -> None:
        self._sides, self._coding = sides, coding
        # By thread, which has one device: the sum, and the event after it.
        self._sums: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    def look(self, x: Tensor, coding: Coding | None = None) -> None:
        """Examine a part `[B, C, n, H, W]` of the piece, without a wait for the device.

        `coding` has made it; None: that of the run.
        """
        total = x.sum(dtype=torch.float32)  # finite for less than 5e33 finite ones in float16
        coding = coding or self._coding
        if coding is not None:
            total.add_(coding.verdict())
        thread = threading.get_ident()
        if thread in self._sums:
            before, summed = self._sums[thread]
            total.add_(before)
        else:
            summed = torch.cuda.Event() if x.device.type == "cuda" else None
        if summed is not None:
            summed.record(torch.cuda.current_stream(x.device))
        self._sums[thread] = total, summed

    def overflowed(self) -> bool:
        """Wait for the work on the piece, and return whether it has NaN or infinity."""
        return not all(math.isfinite(self._read(*each)) for each in self._sums.values())

    def _read(self, total: Tensor, summed: torch.cuda.Event | None) -> float:
        if summed is None:
            return total.item()
        # On a stream of its own: the device may compute the next piece already.
        summed.synchronize()
        side = self._sides.get(total.device)
        if side is None:
            side = self._sides[total.device] = torch.cuda.Stream(total.device)
        with torch.cuda.stream(side):
            return total.item()


class Watch:
    """Examines the pieces of one run for NaN and infinity, and for values out of int8."""

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._findings: deque[Finding] = deque()

    def next_piece(self) -> Finding:
        """Return the examination of the next piece."""
        self._findings.append(Finding(self._sides, self._coding))
        return self._findings[-1]

    def overflowed(self) -> bool:
        """Return whether the piece after the one of the last call has NaN or infinity."""
        return self._findings.popleft().overflowed()


class Output:
    """The wanted frames of a decode: new tensors, or parts of the caller's memory.

    Args:
        config: Configuration of the VAE.
        dtype: Dtype of new tensors.
        out: `[B, C, T, H, W]`, or None.
        images: `[B, T, H, W, C]` of floats in [0, 1], uint8 or uint16, or None.
        wanted: The frames; all by default.
        writer: Writes into memory of the host; None: it is written at once.
        watch: Examines the pieces; None: they need no examination.
    """

    def __init__(
        self,
        config: VAEConfig,
        dtype: torch.dtype,
        out: Tensor | None = None,
        images: Tensor | None = None,
        wanted: Wanted | None = None,
        writer: BackgroundWriter | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._config, self._dtype, self._out, self._images = config, dtype, out, images
        self._wanted = wanted or Wanted()
        self._writer, self._watch = writer, watch
        # Pixels of a piece per pixel of the network's output, in height and width.
        self._size = config.patch_size * config.output_scale
        self._order = COLUMN_FIRST if config.patch_size > 1 else ROW_FIRST

    @property
    def error(self) -> BaseException | None:
        """The error of the writer, or None."""
        return None if self._writer is None else self._writer.error

    def end_after(self, latents: int) -> None:
        """Drop the frames after those of the next `latents`, none of which is a first one."""
        self._wanted.end_after(latents * self._config.temporal_compression)

    def write(self, x: Tensor) -> Tensor:
        """Take frames `x` `[B, C, n, H, W]`, and return the piece of the wanted ones."""
        skipped, place = self._wanted.passed(x.shape[2])
        x = x[:, :, skipped : skipped + place.stop - place.start]
        finding = self._finding(place)
        if finding is not None:
            finding.look(x)
        target = self._target(place)
        if target is None:
            return self._new(x)
        self._place(x, target)
        return target

    def chunk(self, latent: Tensor, *, first: bool) -> "TiledChunk":
        """Return a target for tiles of the frames of a `latent` `[B, C, t, h, w]`."""
        batch, channels, _, height, width = self._config.decoded_shape(latent.shape)
        count = 1 if first else latent.shape[2] * self._config.temporal_compression
        skipped, place = self._wanted.passed(count)
        frames = place.stop - place.start
        piece = self._target(place)
        if piece is None:
            piece = torch.empty(
                (batch, channels, frames, height, width),
                dtype=self._dtype,
                device=latent.device,
                memory_format=torch.channels_last_3d,
            )
        return TiledChunk(self, piece, self._finding(place), skipped, frames)

    def put(
        self,
        x: Tensor,
        piece: Tensor,
        finding: Finding | None,
        time: slice,
        rows: Span,
        columns: Span,
        coding: Coding | None,
    ) -> None:
        """Write a part `[B, C, n, h, w]` of some frames to its place in a piece, and examine it."""
        down, across = (slice(self._size * a, self._size * b) for a, b in (rows, columns))
        if self._images is None:
            target = piece[:, :, time, down, across]
        else:
            target = piece[:, time, down, across]
        if finding is not None:
            finding.look(x, coding)
        self._place(x, target)

    def _finding(self, place: slice) -> Finding | None:
        """Return the examination of a piece; None for one without frames, which is not yielded."""
        return self._watch.next_piece() if self._watch and place.stop > place.start else None

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

    def _place(self, x: Tensor, target: Tensor) -> None:
        if not target.numel():
            return
        if self._writer is not None:
            held = uint16_as_int16(self._converted(x, target))
            self._writer.put(held, uint16_as_int16(target))
            return
        with torch.inference_mode(target.is_inference()):  # otherwise it cannot be written to
            if self._images is not None:
                frames_to_images(x, patch=self._size, order=self._order, out=target)
            else:
                pixel_shuffle_3d(x, (1, self._size, self._size), self._order, out=target)

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

    def put(
        self, x: Tensor, start: int, rows: Span, columns: Span, coding: Coding | None = None
    ) -> None:
        """Write a part of the frames from `start` on; threads of devices may do so at once."""
        first = max(0, self._skipped - start)
        last = min(x.shape[2], self._skipped + self._frames - start)
        if first < last:
            time = slice(start + first - self._skipped, start + last - self._skipped)
            place = self.piece, self._finding, time, rows, columns
            self._output.put(x[:, :, first:last], *place, coding)


def background_writer(device: torch.device, target: Tensor | None) -> BackgroundWriter | None:
    """Return a writer for pieces that go from `device` to `target` on the host, or None."""
    if target is None or device.type == "cpu" or target.device.type != "cpu":
        return None
    return BackgroundWriter(_fill, dtype=None)


def _fill(frames: Tensor, target: Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(frames)
