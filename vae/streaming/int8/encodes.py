"""Encodes in int8 whose values are out of its range: found piece by piece, continued in 16 bits."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator

from torch import Tensor

from ....kernels import log_once
from ...layers.inputs.coding import Coding
from ...layers.oom import Relief
from ...models.base import Network
from ...models.config import VAEConfig
from ...models.receptive_field import frames_before
from ..overflow import OUT_OF_RANGE
from ..part import KeptPieces


def within_range(
    coding: Coding,
    source: Iterator[Tensor],
    encoder: Network,
    config: VAEConfig,
    run: Callable[..., Generator[Tensor, None, None]],
    relief: Relief,
    *,
    known: bool,
) -> Iterator[Tensor]:
    """Yield the latents of an encode in int8 until a piece is out of range, then those in 16 bits.

    The other encode takes the frames before that piece again, to fill the caches of the
    convolutions: 112 of Wan and SeedVR2. Those of an iterator are copied until no latent needs
    them: 0.3 GB of 720 x 1280 in uint8.

    Args:
        coding: The convolutions in int8.
        source: The checked frames, `[B, C, t, H, W]` each.
        encoder: The encoder.
        config: Configuration of the VAE.
        run: Starts an encode of pieces of frames, with its `coding`, and whether it `begins` with
            the first frame of a video. Its pieces are latents `[B, C_latent, n, h, w]`.
        relief: Frees memory when it runs out.
        known: The first piece is the whole video, and stays in memory.

    Yields:
        `[B, C_latent, n, h, w]`; every latent once.
    """
    video = next(source) if known else None
    kept = KeptPieces(source)
    before = math.ceil(frames_before(encoder.layers()) / config.temporal_compression)

    def start_of(latent: int) -> tuple[int, int]:
        """Return the first latent of an encode that is right from `latent` on, and its frame."""
        first = max(0, latent - before)
        return first, first and config.frames(first)

    at, frames = 0, kept if video is None else iter([video])
    with contextlib.closing(run(frames, coding=coding)) as pieces:
        for piece in pieces:
            if relief.finish(coding.verdict).item():  # waits for the device, once per piece
                break
            yield piece
            at += piece.shape[2]
            kept.release(start_of(at)[1])
        else:
            return
        del piece  # free it before the other encode makes its plan
    log_once(OUT_OF_RANGE)
    latent, first = start_of(at)
    again = kept.again(first)[1] if video is None else iter([video[:, :, first:]])
    with contextlib.closing(run(again, begins=first == 0 or config.is_of_pictures)) as pieces:
        for piece in pieces:
            fresh = piece[:, :, max(0, at - latent) :]
            latent += piece.shape[2]
            if fresh.shape[2]:
                yield fresh
