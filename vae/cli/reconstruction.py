"""Encode and decode a video piece by piece, for `fast-video-vae demo`.

Reading, encoding and decoding are lazy, and only source frames between encoder and decoder are
kept, so memory does not grow with the length of the video.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import synchronize
from ..media.pictures import with_channels
from ..media.video_reader import VideoFile
from ..media.video_writer import frames_to_uint8
from ..model import VideoVAE
from ..streaming.options import AUTOMATIC, StreamOptions
from ..streaming.source import Rereadable


class RoundTrip:
    """Iterates over a video and its reconstruction, and measures both.

    Yields pairs `(source, result)`, uint8 on the CPU: `[t, H, W, 3]`, cropped to whole latents, and
    `[t, s H, s W, 3]`, where `s` is the `output_scale` of the VAE. Frames after the last `4 n + 1`
    are dropped, as by `encode_stream`.
    """

    def __init__(
        self,
        vae: VideoVAE,
        video: VideoFile,
        options: StreamOptions = AUTOMATIC,
        *,
        stretch: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; nothing is read yet."""
        if vae.config.encoder_width is None:
            raise ValueError("the VAE has a decoder only; expected one that can encode too")
        self.vae = vae
        self.video = video
        self.options = options
        self.stretch = dict(stretch or {})
        self.frames = 0
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self._error = 0.0
        self._values = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        config, device = self.vae.config, self.vae.device
        kept: deque[Tensor] = deque()  # source frames that are not decoded yet
        reads: list[TimedIterator] = []
        seen = 0

        def source() -> Iterator[Tensor]:
            nonlocal seen
            # The result is compared in 8 bits.
            pieces = self.video.pieces(
                multiple=config.spatial_compression, dtype=torch.uint8, **self.stretch
            )
            at = 0
            reads.append(TimedIterator(pieces, device))
            for piece in reads[-1]:
                kept.extend(piece[0, :, max(0, seen - at) :].permute(1, 2, 3, 0))
                at += piece.shape[2]
                seen = max(seen, at)
                yield with_channels(piece, config.image_channels)

        stream = self.vae.encode_stream(Rereadable(source), self.options)
        encoding = TimedIterator(stream, device)
        decoding = TimedIterator(self.vae.decode_stream(encoding, self.options), device)
        for piece in decoding:
            result = frames_to_uint8(piece).cpu()
            original = torch.stack([kept.popleft() for _ in range(len(result))])
            self.frames += len(result)
            self.encode_seconds = encoding.seconds - sum(each.seconds for each in reads)
            self.decode_seconds = decoding.seconds - encoding.seconds
            self._compare(original, result)
            yield original, result

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio in dB over all frames and channels, of 8-bit pictures.

        A larger result is averaged down to the size of the source. Infinite if all values are
        equal.
        """
        if not self._error:
            return math.inf
        return 10 * math.log10(255**2 * self._values / self._error)

    def _compare(self, source: Tensor, result: Tensor) -> None:
        error = source.float() - shrunk(result, self.vae.config.output_scale).float()
        self._error += error.square_().sum(dtype=torch.float64).item()
        self._values += error.numel()


class TimedIterator:
    """An iterator that sums the seconds of its `next` calls, including the work of the device."""

    def __init__(self, items: Iterator[Tensor], device: torch.device) -> None:
        self.seconds = 0.0
        self._items = items
        self._device = device

    def __iter__(self) -> "TimedIterator":
        return self

    def __next__(self) -> Tensor:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            synchronize(self._device)
            self.seconds += time.perf_counter() - start


def shrunk(pictures: Tensor, factor: int) -> Tensor:
    """Average `pictures`, `[t, s H, s W, 3]` uint8, to `[t, H, W, 3]`; `factor` is s."""
    if factor == 1:
        return pictures
    small = functional.avg_pool2d(pictures.permute(0, 3, 1, 2).float(), factor)
    return small.round_().to(torch.uint8).permute(0, 2, 3, 1)
