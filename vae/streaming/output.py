"""Where decoded frames go: new tensors, or memory of the caller's, whole or in tiles.

Pixels that still lie in channels (the patches of Wan 2.2, the phases of 2x decoders) come to their
places in the same pass.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import frames_to_images, pixel_shuffle_3d
from ..models.config import VAEConfig
from ..models.patchify import COLUMN_FIRST, ROW_FIRST

Span = tuple[int, int]
Attempt = Callable[[Callable[[], Tensor]], Tensor]


class Output:
    """Takes what leaves the last layer, in the order of time, and gives it on as pieces.

    Args:
        config: What the VAE is.
        dtype: Of the pieces where there are neither `out` nor `images`.
        out: `[B, C, T, H, W]` of any dtype, strides and device, for the frames; or None.
        images: `[B, T, H, W, C]`, of a float dtype or uint8, for images in [0, 1] or in 8 bits; or
            None. Without either a piece is a tensor of its own.
        wanted: The frames that are kept, and that `out` or `images` have room for; None: all.
        start: Number of the first frame that will come.
        attempt: Calls what allocates, such as `Relief.attempt`.

    Raises:
        ValueError: There are both `out` and `images`.
    """

    def __init__(
        self,
        config: VAEConfig,
        dtype: torch.dtype,
        out: Tensor | None = None,
        images: Tensor | None = None,
        wanted: range | None = None,
        start: int = 0,
        attempt: Attempt = lambda do: do(),
    ) -> None:
        if out is not None and images is not None:
            raise ValueError("there are both out and images; expected one of the two")
        self._out, self._images, self._wanted = out, images, wanted
        self._attempt = attempt
        self._dtype = dtype
        self._at = start
        self._size = config.patch_size * config.output_scale
        self._order = COLUMN_FIRST if config.patch_size > 1 else ROW_FIRST

    def write(self, x: Tensor) -> Tensor:
        """Take frames, `[B, C, n, H, W]`, and return the piece: those of them that are wanted."""
        part, x = self._passed(x)  # before anything that may be tried again
        if self._out is None and self._images is None:
            size = self._size

            def new() -> Tensor:
                frames = x.to(self._dtype)
                if size == 1:
                    return frames
                return pixel_shuffle_3d(frames, (1, size, size), self._order)

            return self._attempt(new)
        target, as_images = self._target(part), self._images is not None
        return self._attempt(lambda: _placed(x, target, self._size, self._order, as_images))

    def chunk(self, like: Tensor, frames: int, shape: tuple[int, int, int]) -> "Chunk":
        """Begin frames that will come in tiles.

        Args:
            like: Gives batch and device.
            frames: How many.
            shape: Channels, height and width of an image.

        Returns:
            What takes the tiles.
        """
        skipped, part = self._wanted_of(frames)
        self._at += frames
        if self._out is None and self._images is None:
            channels, height, width = shape
            memory = (like.shape[0], part.stop - part.start, height, width, channels)
            empty = functools.partial(like.new_empty, memory, dtype=self._dtype)
            whole = self._attempt(empty).movedim(-1, 1)
            return Chunk(whole, skipped, self._size, self._order, self._attempt, as_images=False)
        target, as_images = self._target(part), self._images is not None
        return Chunk(target, skipped, self._size, self._order, self._attempt, as_images=as_images)

    def _passed(self, x: Tensor) -> tuple[slice, Tensor]:
        """Note that frames have come: their place in the target, and those that are wanted."""
        skipped, part = self._wanted_of(x.shape[2])
        self._at += x.shape[2]
        return part, x[:, :, skipped : skipped + part.stop - part.start]

    def _wanted_of(self, frames: int) -> tuple[int, slice]:
        """Of the next frames, how many come before the wanted ones, and the place of those."""
        if self._wanted is None:
            return 0, slice(self._at, self._at + frames)
        first = min(max(self._at, self._wanted.start), self._at + frames)
        last = max(first, min(self._at + frames, self._wanted.stop))
        offset = self._wanted.start
        # Before the first wanted frame there are none, and the place of none is the beginning.
        place = max(0, first - offset)
        return first - self._at, slice(place, place + last - first)

    def _target(self, part: slice) -> Tensor:
        if self._images is not None:
            return self._images[:, part]
        if self._out is None:
            raise ValueError("there is neither out nor images; expected one of the two")
        return self._out[:, :, part]


class Chunk:
    """Frames that come in tiles.

    Args:
        piece: Where they go: `[B, C, n, H, W]`, or `[B, n, H, W, C]` as images.
        skipped: Frames of the chunk before the first of those.
        size: Pixels of the piece for each that comes, in height and width.
        order: See `pixels.py`.
        attempt: Calls what allocates.
        as_images: It is images.
    """

    def __init__(
        self,
        piece: Tensor,
        skipped: int,
        size: int,
        order: str,
        attempt: Attempt,
        *,
        as_images: bool,
    ) -> None:
        self.piece = piece
        self._attempt = attempt
        self._skipped, self._size, self._order, self._as_images = skipped, size, order, as_images
        self._frames = piece.shape[1 if as_images else 2]

    def put(self, x: Tensor, start: int, rows: Span, columns: Span) -> None:
        """Write a part of some frames.

        Args:
            x: `[B, C, n, h, w]`.
            start: The first of the frames, counted from that of the chunk.
            rows: Where the part is in the frames that leave the last layer.
            columns: Likewise.
        """
        first = max(0, self._skipped - start)
        last = min(x.shape[2], self._skipped + self._frames - start)
        if first >= last:
            return
        time = slice(start + first - self._skipped, start + last - self._skipped)
        down, across = (slice(self._size * a, self._size * b) for a, b in (rows, columns))
        target = (
            self.piece[:, time, down, across]
            if self._as_images
            else self.piece[:, :, time, down, across]
        )
        part, size, order = x[:, :, first:last], self._size, self._order
        self._attempt(lambda: _placed(part, target, size, order, self._as_images))


def _placed(x: Tensor, target: Tensor, size: int, order: str, as_images: bool) -> Tensor:
    with torch.inference_mode(target.is_inference()):  # else it may not be written to
        if not target.numel():
            return target
        if as_images:
            return frames_to_images(x, patch=size, order=order, out=target)
        return pixel_shuffle_3d(x, (1, size, size), order, out=target)
