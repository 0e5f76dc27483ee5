"""Options of one stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StreamOptions:
    """Options of one stream; they change the result by rounding only.

    Attributes:
        chunk: Latents per step; -1: all. None: chosen from size and memory, or 1 for a video in
            pieces.
        dtype: Dtype of the computation and of the result; None: the VAE's.
        limit_bytes: Memory limit of a step; None: the VAE's.
        tile: Height and width in pixels of the tiles for the layers near the frames; None: chosen
            from size and memory.
        release: Called with a device whose memory runs out, to release memory of the caller there;
            None: nothing.
        whole: No piece is looked at before the last one, and all of them are in memory of the
            device: what a decode has to read there is read once, at its end.

    Raises:
        ValueError: A field has another type, or a size is not positive.
    """

    chunk: int | None = None
    dtype: torch.dtype | None = None
    limit_bytes: int | None = None
    tile: tuple[int, int] | None = None
    release: Callable[[torch.device], None] | None = None
    whole: bool = False

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
