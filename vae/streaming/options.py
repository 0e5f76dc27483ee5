"""What a caller may ask of one stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..validation import check_chunk, check_dtype, check_tile


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
        check_chunk(self.chunk)
        if self.dtype is not None:
            check_dtype(self.dtype)
        check_tile(self.tile)


AUTOMATIC = StreamOptions()
