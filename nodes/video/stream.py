"""A fast VAE between latents and the frames of video files, a few frames at a time.

Data is held a piece at a time, so memory does not grow with the length of the video; only latents
are collected, which are 50 to 200 times smaller than their frames in 8 bits.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...vae import Rereadable, StreamOptions, media, rechunk, retried
from ..host import timing
from ..host.oom import in_turn
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
    convert = functools.partial(media.pictures_of, dtype=dtype, alpha=alpha)
    deep, release = dtype != torch.uint8, driver.release(vae)

    def pictures() -> Iterator[Tensor]:
        count = vae.first_stage_model.config.frames(latent.shape[2])
        progress = Progress(count if frames is None else len(frames))
        for piece in driver.decode_pieces(vae, latent, options, frames=frames, deep=deep):
            for part in media.parts_of(piece, dtype):
                made = functools.partial(convert, part)
                done = retried(made, vae.device, "a decode", release)
                progress.passed(len(done), done)
                yield done

    return timing.drawn("VAE decode", pictures(), driver.label(vae), vae.device)


def encode_video(
    vae: FastVAE,
    pieces: Callable[[], Iterator[Tensor]],
    count_estimate: int | None = None,
    options: StreamOptions = driver.AUTOMATIC,
) -> Tensor:
    """Encode pieces `[1, C, t, H, W]`, which are read again if memory runs out, to a LATENT."""
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model

    def groups() -> Iterator[Tensor]:
        read = timing.drawn("file", pieces(), device=vae.device)
        return _whole_groups(read, model.config.temporal_compression)

    def means(_: bool) -> Tensor:
        begun = groups()
        first = next(begun, None)
        if first is None:
            raise ValueError("the video has no frames; expected at least one")
        second = next(begun, None)
        model.check_frames(first, vae.device, 0)
        height, width = first.shape[3:]
        frames = 1 if second is None else 1 + second.shape[2]
        shape = *first.shape[:2], frames, height, width
        setting, _ = driver.begin(vae, shape, options, encode=True)
        driver.log_cut(vae, height, width)
        if setting.chunk is None:
            chunk = model.plan(height, width, setting, encode=True).chunk
            setting = replace(setting, chunk=chunk)
        # A single frame is passed as a tensor, which takes a separate path.
        source: Tensor | Rereadable = first
        if second is not None:
            readings = [itertools.chain([first, second], begun)]  # what was read is not read again
            source = Rereadable(lambda: readings.pop() if readings else groups())
        progress = Progress(model.config.latent_frames(max(count_estimate or 1, frames)))
        stream = model.encode_stream(source, setting, scaled=False)
        return driver.moved(vae, progress.counted(stream))

    with timing.span("VAE encode", driver.label(vae), vae.device):
        found = in_turn(vae.device, "an encode", means)
    return found[0].movedim(1, 0).contiguous() if vae.latent_dim == 2 else found


def _whole_groups(pieces: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the first frame, then complete groups of `size`; dropped frames are logged."""
    count = 0
    for run in rechunk(pieces, size):
        if count and run.shape[2] < size:
            text = "Fast Video VAE: the last %d of %d frames are dropped; the VAE needs %d n + 1"
            _logger.info(text, run.shape[2], count + run.shape[2], size)
            return
        count += run.shape[2]
        yield run
