"""Encodes in int8 whose values are out of its range: found piece by piece, continued in 16 bits."""

import contextlib
import math
from collections.abc import Callable, Iterator

from torch import Tensor

from ....kernels import log_once
from ...layers.inputs.coding import Coding
from ...models.base import Network
from ...models.config import VAEConfig
from ...models.receptive_field import frames_before
from ..overflow import OUT_OF_RANGE
from ..part import KeptPieces


def within_range(
    coding: Coding,
    frames: Tensor | Iterator[Tensor],
    encoder: Network,
    config: VAEConfig,
    run: Callable[..., Iterator[Tensor]],
) -> Iterator[Tensor]:
    """Yield the latents of an encode in int8 until a piece is out of range, then those in 16 bits.

    The other encode takes the frames before that piece again, to fill the caches of the
    convolutions. Those of an iterator are kept until no latent needs them.

    Args:
        coding: The convolutions in int8.
        frames: The checked frames, `[B, C, T, H, W]`: all of them, or in pieces.
        encoder: The encoder.
        config: Configuration of the VAE.
        run: Starts an encode of pieces of frames, with its `coding`, and whether it `begins` with
            the first frame of a video. Its pieces are latents `[B, C_latent, n, h, w]`.

    Yields:
        `[B, C_latent, n, h, w]`; every latent once.
    """
    kept = None if isinstance(frames, Tensor) else KeptPieces(frames)
    before = math.ceil(frames_before(encoder.layers()) / config.temporal_compression)

    def start_of(latent: int) -> tuple[int, int]:
        """Return the first latent of an encode that is right from `latent` on, and its frame."""
        first = max(0, latent - before)
        return first, first and config.frames(first)

    at, whole = 0, iter([frames] if kept is None else kept)
    with contextlib.closing(run(whole, coding=coding)) as pieces:  # pyright: ignore
        for piece in pieces:
            if coding.verdict().item():  # the device is waited for, as little as a piece takes
                break
            yield piece
            at += piece.shape[2]
            if kept is not None:
                kept.release(start_of(at)[1])
        else:
            return
        del piece  # free it before the other encode makes its plan
    log_once(OUT_OF_RANGE)
    latent, first = start_of(at)
    rest = frames[:, :, first:] if isinstance(frames, Tensor) else None
    again = iter([rest]) if kept is None else kept.again(first)[1]
    for piece in run(again, begins=first == 0 or config.is_of_pictures):
        fresh = piece[:, :, max(0, at - latent) :]
        latent += piece.shape[2]
        if fresh.shape[2]:
            yield fresh
