"""A fast VAE between latents and the frames of video files, a few frames at a time.

Data is held a piece at a time, so memory does not grow with the length of the video; only latents
are collected, which are 50 to 200 times smaller than their frames in 8 bits.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...vae import Relief, StreamOptions, media, rechunk
from ..host import timing
from ..host.oom import Way, give_back, in_turn
from ..host.progress import Progress
from ..vae import pieces as driver
from ..vae.comfy_vae import FastVAE

_logger = logging.getLogger(__name__)


def decode_pictures(
    vae: FastVAE,
    latent: Tensor,
    options: StreamOptions = driver.AUTOMATIC,
    frames: range | None = None,
    *,
    dtype: torch.dtype = torch.uint8,
    alpha: bool = True,
) -> Iterator[Tensor]:
    """Decode `[1, C_latent, t, h, w]` and yield pictures `[n, H, W, C]` on the VAE's device."""
    vae.throw_exception_if_invalid()
    try:
        # In another function, so that its tensors are gone before memory is released.
        made = _pictures(vae, latent, options, frames, dtype, alpha)
        yield from timing.drawn("VAE decode", made, driver.label(vae), vae.device)
    finally:
        give_back(vae.device)


def encode_video(
    vae: FastVAE,
    pieces: Callable[[], Iterator[Tensor]],
    count_estimate: int | None = None,
    options: StreamOptions = driver.AUTOMATIC,
) -> Tensor:
    """Encode pieces `[1, C, t, H, W]`, which are read again if memory ran out, to a LATENT."""

    def go(way: Way) -> Tensor:
        read = timing.drawn("file", pieces(), device=vae.device)
        return _means(vae, read, count_estimate, options, way)

    vae.throw_exception_if_invalid()
    ways = driver.ways(vae, None, encode=True, single_frame=count_estimate == 1)
    with timing.span("VAE encode", driver.label(vae), vae.device):
        means = in_turn(driver.devices(vae), "an encode", ways, go)
    if vae.format_encoded is not None:
        means = vae.format_encoded(means)
    return means[0].movedim(1, 0).contiguous() if vae.latent_dim == 2 else means


def _pictures(
    vae: FastVAE,
    latent: Tensor,
    options: StreamOptions,
    frames: range | None,
    dtype: torch.dtype,
    alpha: bool,
) -> Iterator[Tensor]:
    convert = functools.partial(media.pictures_of, dtype=dtype, alpha=alpha)
    count = vae.first_stage_model.config.frames(latent.shape[2])
    progress = Progress(count if frames is None else len(frames))
    relief = Relief(vae.device, "a decode", driver.release(vae))
    deep = dtype != torch.uint8
    for piece in driver.decode_pieces(vae, latent, options, frames=frames, deep=deep):
        for part in media.parts_of(piece, dtype):
            pictures = relief.finish(functools.partial(convert, part))
            progress.passed(len(pictures), pictures)
            yield pictures


def _means(
    vae: FastVAE,
    pieces: Iterator[Tensor],
    count_estimate: int | None,
    options: StreamOptions,
    way: Way,
) -> Tensor:
    model = vae.first_stage_model
    groups = _whole_groups(pieces, model.config.temporal_compression)
    first = next(groups, None)
    if first is None:
        raise ValueError("the video has no frames; expected at least one")
    model.check_frames(first, vae.device, 0)
    second = next(groups, None)
    shape = (*first.shape[:2], 1 if second is None else 1 + second.shape[2], *first.shape[3:])
    driver.load(vae, driver.encode_bytes(vae, torch.Size(shape), way), way)
    options = driver.with_chunk(vae, *first.shape[3:], options, way)
    # A single frame is passed as a tensor, which takes a separate path.
    source = first if second is None else itertools.chain([first, second], groups)
    progress = Progress(model.config.latent_frames(max(count_estimate or 1, shape[2])))
    return driver.moved(vae, progress.counted(driver.encode_pieces(vae, source, way, options)))


def _whole_groups(pieces: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the first frame, then complete groups of `size`; dropped frames are logged."""
    count = 0
    for run in rechunk(pieces, size):
        if count and run.shape[2] < size:
            _logger.info(
                "Fast Video VAE: the last %d of %d frames are dropped; the VAE needs %d n + 1",
                run.shape[2],
                count + run.shape[2],
                size,
            )
            return
        count += run.shape[2]
        yield run
