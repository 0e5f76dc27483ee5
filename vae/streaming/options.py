"""What a caller may ask of one stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StreamOptions:
    """How one stream runs, where the caller has a wish; it never changes what is computed.

    Attributes:
        chunk: Latents per step; -1: all. None: chosen from size and memory, and one at a time where
            the video comes in pieces.
        dtype: Of the computation and of what comes; None: that of the VAE.
        limit_bytes: Memory that a step may take; None: as the VAE has it.
        tile: Height and width in pixels of the tiles that the layers at the frames' end run in,
            with the same result; None: chosen from size and memory.
        release: Called when memory runs out, to give back what the caller can; None: nothing.

    Raises:
        ValueError: A field has another type, or a size that is not positive.
    """

    chunk: int | None = None
    dtype: torch.dtype | None = None
    limit_bytes: int | None = None
    tile: tuple[int, int] | None = None
    release: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        chunk, dtype, tile = self.chunk, self.dtype, self.tile
        if chunk is not None and (type(chunk) is not int or (chunk < 1 and chunk != -1)):
            raise ValueError(
                f"chunk is {chunk!r}; expected a number of latents, -1 for all, or None"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype is {dtype!r}; expected a float dtype such as torch.float32")
        pair = tile if isinstance(tile, (tuple, list)) else ()
        if tile is not None and (
            len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair)
        ):
            raise ValueError(f"tile is {tile!r}; expected height and width in pixels, or None")


AUTOMATIC = StreamOptions()
