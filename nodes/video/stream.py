"""A fast VAE between latents and the frames of video files, a few frames at a time.

What goes through is held a piece at a time, so that the memory does not grow with the length of the
video; only latents are collected, which are 50 to 200 times as small as their frames in 8 bits.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels import frames_to_images
from ...vae import Relief, StreamOptions, rechunk
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
) -> Iterator[Tensor]:
    """Decode a latent and give the pictures away as they are done.

    Arguments are those of `pieces.decode_pieces`, of one video.

    Yields:
        Pictures, `[n, H, W, C]` uint8 on the device of the VAE, the byte being `255 * x` without
        its fraction, as ComfyUI saves an IMAGE; `n` varies.

    Raises:
        ValueError: The latent has another shape or dtype, or is not finite.
    """
    vae.throw_exception_if_invalid()
    try:
        # Not here: what is done with is to be gone before the memory is given back.
        made = _pictures(vae, latent, options, frames)
        yield from timing.drawn("VAE decode", made, device=vae.device)
    finally:
        give_back(vae.device)


def encode_video(
    vae: FastVAE,
    pieces: Callable[[], Iterator[Tensor]],
    count_estimate: int | None = None,
    options: StreamOptions = driver.AUTOMATIC,
) -> Tensor:
    """Encode a video that comes in pieces.

    `pieces` gives the video from its beginning: `[1, C, t, H, W]` each, any `t >= 1`, uint8 or a
    float dtype in [-1, 1], one after the other in time. It is asked again where memory ran out and
    the stream could not help itself. Frames after the last `4 n + 1` are left out, with a line in
    the log. The estimate is for the progress bar; None: it is not known how many frames will come.

    Returns:
        `[1, C_latent, t, H / 8, W / 8]`, or `[T, C_latent, H / 16, W / 16]` of a VAE of pictures;
        not normalised (of SeedVR2 scaled), on the output device.

    Raises:
        ValueError: A piece has another shape or dtype; no frame came; or the VAE has no encoder.
        InterruptProcessingException: The user pressed stop. It derives from `BaseException`.
    """

    def go(way: Way) -> Tensor:
        read = timing.drawn("file", pieces(), device=vae.device)
        return _means(vae, read, count_estimate, options, way)

    vae.throw_exception_if_invalid()
    ways = driver.ways(vae, None, encode=True, single_frame=count_estimate == 1)
    with timing.span("VAE encode", device=vae.device):
        means = in_turn(vae.device, "an encode", ways, go)
    if vae.format_encoded is not None:
        means = vae.format_encoded(means)
    return means[0].movedim(1, 0).contiguous() if vae.latent_dim == 2 else means


def _pictures(
    vae: FastVAE,
    latent: Tensor,
    options: StreamOptions,
    frames: range | None,
) -> Iterator[Tensor]:
    count = vae.first_stage_model.config.frames(latent.shape[2])
    progress = Progress(count if frames is None else len(frames))
    relief = Relief(vae.device, "a decode", driver.release(vae))
    for piece in driver.decode_pieces(vae, latent, options, frames=frames):
        pictures = relief.finish(functools.partial(frames_to_images, piece, dtype=torch.uint8))
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
        raise ValueError("no frame came; expected at least one")
    model.check_frames(first)
    second = next(groups, None)
    shape = (*first.shape[:2], 1 if second is None else 1 + second.shape[2], *first.shape[3:])
    driver.load(vae, driver.encode_bytes(vae, torch.Size(shape), way), way)
    options = driver.with_chunk(vae, *first.shape[3:], options, way)
    # A lone frame goes as a tensor, which takes a path of its own.
    source = first if second is None else itertools.chain([first, second], groups)
    progress = Progress(model.config.latent_frames(max(count_estimate or 1, shape[2])))
    done = [
        latent.to(vae.output_device, vae.vae_output_dtype())
        for latent in progress.counted(driver.encode_pieces(vae, source, way, options))
    ]
    return torch.cat(done, dim=2)


def _whole_groups(pieces: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """The first frame, then groups of `size` and no others; the log says what is left out."""
    count = 0
    for run in rechunk(pieces, size):
        if count and run.shape[2] < size:
            _logger.info(
                "Fast Video VAE: the last %d of %d frames are left out; the VAE takes %d n + 1",
                run.shape[2],
                count + run.shape[2],
                size,
            )
            return
        count += run.shape[2]
        yield run
