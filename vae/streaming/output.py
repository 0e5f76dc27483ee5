"""Destinations of the results of a run: latents, or frames in new tensors or in buffers.

Pixels in channels (the patches of Wan 2.2, the phases of 2x decoders) are rearranged in the same
pass. Each piece of a decode is examined by one sum: what overflows becomes infinite, and the next
norm makes it NaN, which nothing in the networks turns into a finite number again.
"""

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import frames_to_images, lacks, pixel_shuffle_3d
from ..background_writer import BackgroundWriter
from ..layers.inputs.coding import Coding
from ..models.config import VAEConfig
from ..models.patchify import COLUMN_FIRST, ROW_FIRST
from ..models.receptive_field import Span
from .source import OPEN_END
from .upload import uint16_as_int16


class Wanted:
    """Which results of a run are wanted, counted as they come.

    `at` is the number of the first result of the run, `origin` that in the caller's memory.
    """

    def __init__(self, wanted: range = range(OPEN_END), at: int = 0, origin: int = 0) -> None:
        self._wanted, self._at, self._origin = wanted, at, origin

    def end_after(self, count: int) -> None:
        """Drop all that comes after the next `count` results."""
        start, stop = self._wanted.start, self._wanted.stop
        self._wanted = range(start, max(start, min(stop, self._at + count)))

    def passed(self, count: int) -> tuple[int, slice]:
        """Count results; return how many precede the wanted ones, and the place of these.

        The place is in the caller's memory; it is empty without a wanted one.
        """
        at, self._at = self._at, self._at + count
        first = min(max(at, self._wanted.start), at + count)
        last = max(first, min(at + count, self._wanted.stop))
        place = max(0, first - self._origin)
        return first - at, slice(place, place + last - first)


class Sink:
    """Takes the output of the last layer in order of time."""

    times = 1  # Results of a latent that is not the first

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def write(self, x: Tensor) -> Tensor:
        """Take the output `[B, C, n, H, W]`; return the wanted results, which can be none."""
        skipped, place = self._wanted.passed(x.shape[2])
        return self._written(x[:, :, skipped : skipped + place.stop - place.start], place)

    def end_after(self, latents: int) -> None:
        """Drop the results after those of the next `latents`, none of which is a first one."""
        self._wanted.end_after(latents * self.times)

    def _written(self, x: Tensor, place: slice) -> Tensor:
        """Return the wanted results `x` as the caller gets them."""
        raise NotImplementedError


class LatentOutput(Sink):
    """The wanted latents of an encode, which `leave` makes of the output of the last layer."""

    def __init__(self, leave: Callable[[Tensor], Tensor], wanted: Wanted) -> None:
        super().__init__(wanted)
        self._leave = leave

    def _written(self, x: Tensor, place: slice) -> Tensor:
        return self._leave(x) if x.shape[2] else x


class Finding:
    """The examination of one piece, in parts and from threads of several devices."""

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._sums: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def look(self, x: Tensor, coding: Coding | None = None) -> None:
        """Examine a part `[B, C, n, H, W]` that `coding` has made, without a wait."""
        total = x.sum(dtype=torch.float32)  # finite for less than 5e33 finite ones in float16
        coding = coding or self._coding
        if coding is not None:
            total.add_(coding.verdict())
        if not total.is_cuda:
            self._sums.append((total, None))
            return
        # Copied at once: the device may compute the next piece when the sum is read.
        copy, copied = total.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record(torch.cuda.current_stream(x.device))
        self._sums.append((copy, copied))

    def overflowed(self) -> bool:
        """Wait for the work on the piece, and return whether it has NaN or infinity."""
        for _, copied in self._sums:
            if copied is not None:
                copied.synchronize()
        return not all(math.isfinite(total.item()) for total, _ in self._sums)


class Watch:
    """Examines the pieces of one run for NaN and infinity, and for values out of int8."""

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._findings: deque[Finding] = deque()

    def next_piece(self) -> Finding:
        """Return the examination of the next piece."""
        self._findings.append(Finding(self._coding))
        return self._findings[-1]

    def overflowed(self) -> bool:
        """Return whether the piece after the one of the last call has NaN or infinity."""
        return self._findings.popleft().overflowed()


class Output(Sink):
    """The wanted frames of a decode: new tensors of `dtype`, or parts of the caller's memory.

    That is `out` `[B, C, T, H, W]`, or `images` `[B, T, H, W, C]` of floats in [0, 1], uint8 or
    uint16. A `writer` writes into memory of the host, and a `watch` examines the pieces.
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
        super().__init__(wanted or Wanted())
        self._config, self._dtype, self._out, self._images = config, dtype, out, images
        self._writer, self._watch = writer, watch
        self.times = config.temporal_compression
        # Pixels of a piece per pixel of the network's output, in height and width.
        self.size = config.patch_size * config.output_scale
        self._order = COLUMN_FIRST if config.patch_size > 1 else ROW_FIRST

    @property
    def error(self) -> BaseException | None:
        """The error of the writer, or None."""
        return None if self._writer is None else self._writer.error

    def _written(self, x: Tensor, place: slice) -> Tensor:
        finding, target = self._finding(place), self._target(place)
        if finding is not None:
            finding.look(x)
        if target is None:
            return self._new(x)
        self.put(x, target)
        return target

    def chunk(self, latent: Tensor, *, first: bool) -> "TiledChunk":
        """Return a target for tiles of the frames of a `latent` `[B, C, t, h, w]`."""
        count = 1 if first else latent.shape[2] * self.times
        skipped, place = self._wanted.passed(count)
        frames = place.stop - place.start
        piece = self._target(place)
        if piece is None:
            batch, channels, _, *sides = self._config.decoded_shape(latent.shape)
            shape, order = (batch, channels, frames, *sides), torch.channels_last_3d
            kind = {"dtype": self._dtype, "device": latent.device}
            piece = torch.empty(shape, memory_format=order, **kind)
        return TiledChunk(self, piece, self._finding(place), skipped, frames)

    def part(self, piece: Tensor, time: slice, down: slice, across: slice) -> Tensor:
        """Return a part of a piece of this output."""
        if self._images is None:
            return piece[:, :, time, down, across]
        return piece[:, time, down, across]

    def put(self, x: Tensor, target: Tensor) -> None:
        """Write the network's output `x` `[B, C, n, h, w]` to a part of a piece."""
        if not target.numel():
            return
        if self._writer is not None:
            held = uint16_as_int16(self._converted(x, target))
            self._writer.put(held, uint16_as_int16(target))
            return
        with torch.inference_mode(target.is_inference()):  # otherwise it cannot be written to
            if self._images is not None:
                frames_to_images(x, patch=self.size, order=self._order, out=target)
            else:
                pixel_shuffle_3d(x, (1, self.size, self.size), self._order, out=target)

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
        if self.size == 1:
            return frames
        return pixel_shuffle_3d(frames, (1, self.size, self.size), self._order)

    def _converted(self, x: Tensor, target: Tensor) -> Tensor:
        """Return `x` in the shape and dtype of `target` `[...]`, on the device of `x`."""
        # A dtype that the device lacks is that of the copy on the host. No device lacks an integer
        # dtype: one without uint16 writes its bits as int16.
        dtype = torch.float32 if lacks(x.device, target.dtype) else target.dtype
        if self._images is None:
            return self._new(x).to(dtype)
        images = frames_to_images(x, dtype=dtype, patch=self.size, order=self._order)
        return images.view(target.shape)


class TiledChunk:
    """Frames that arrive in tiles: `frames` of them after the first `skipped`, in `piece`."""

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
        if first >= last:
            return
        x, at = x[:, :, first:last], start + first - self._skipped
        if self._finding is not None:
            self._finding.look(x, coding)
        size = self._output.size
        down, across = (slice(size * a, size * b) for a, b in (rows, columns))
        self._output.put(
            x, self._output.part(self.piece, slice(at, at + last - first), down, across)
        )


def background_writer(device: torch.device, target: Tensor | None) -> BackgroundWriter | None:
    """Return a writer for pieces that go from `device` to `target` on the host, or None."""
    if target is None or device.type == "cpu" or target.device.type != "cpu":
        return None
    return BackgroundWriter(_fill, dtype=None)


def _fill(frames: Tensor, target: Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(frames)
