"""The kernels of a VAE, built in the background from the moment that it is loaded.

A network runs once on `meta` tensors, in the sizes of usual videos and of a picture, and the ops
that it calls are built and checked. Sizes matter little: see `kernels/ready/variants.py`.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels import Prepared, frames_to_images, pixel_shuffle_3d
from ...layers.inputs.coding import Coding, name_convolutions
from ...layers.temporal_cache import TemporalCache, canonical
from ...models.build import make_decoder, make_encoder
from ...models.config import VAEConfig
from ...models.patchify import COLUMN_FIRST, ROW_FIRST
from ...planning.byte_counter import ByteCounter
from ..executor import advance

# Height and width of the frames in pixels, and the latents of each step: a picture and a video.
_VIDEOS = (((1024, 1024), (1,)), ((480, 832), (1, 1)))

# Dtypes of images: ComfyUI's, and those of files.
_IMAGES = (torch.float32, torch.uint8)


@dataclass(frozen=True)
class Work:
    """What runs on a device."""

    config: VAEConfig
    encodes: bool  # the encoder; otherwise the decoder
    dtype: torch.dtype
    weights_dtype: torch.dtype
    coded: frozenset[str] = frozenset()  # names of the convolutions in int8


_prepared: dict[tuple[torch.device, Work], Prepared] = {}
_lock = threading.Lock()


def prepared(device: torch.device, work: Work) -> Prepared:
    """Return what the background builds for some work of all VAEs of a configuration."""
    key = device, work
    with _lock:
        if key not in _prepared:
            _prepared[key] = Prepared(device, lambda: _record(work))
        _prepared[key].renew()  # after a proof, because its tiles lay memory out in another way
        return _prepared[key]


def _record(work: Work) -> None:
    """Run the network on `meta`."""
    config = work.config
    with torch.device("meta"):
        network = make_encoder(config) if work.encodes else make_decoder(config)
    if network is None:
        return
    name_convolutions(network)
    network.to(work.weights_dtype).requires_grad_(False)
    shrinks = config.patch_size if work.encodes else config.spatial_compression
    channels = config.image_channels * config.patch_size**2
    group = config.temporal_compression if work.encodes else 1
    device = torch.device("meta")
    order = COLUMN_FIRST if config.patch_size > 1 else ROW_FIRST
    inputs = channels if work.encodes else config.latent_channels
    for (height, width), steps in _VIDEOS:
        coding = Coding(work.coded, device) if work.coded else None
        cache = TemporalCache(coding=coding, single_frame=len(steps) == 1)
        for latents in steps:
            frames = 1 if cache.first else latents * group
            shape = 1, inputs, frames, height // shrinks, width // shrinks
            x = torch.empty(shape, dtype=work.dtype, device=device)
            x = canonical(x.contiguous(memory_format=torch.channels_last_3d))
            with torch.inference_mode(False), torch.no_grad(), ByteCounter():
                for y in advance(network.chains(), x, cache):
                    _leave(work, y, order)
            cache.first = config.is_of_pictures


def _leave(work: Work, y: Tensor, order: str) -> None:
    """Convert `[B, C, T, H, W]` to images and to frames, as at the end of a decode."""
    if not work.encodes:
        size = work.config.patch_size * work.config.output_scale
        for dtype in _IMAGES:
            # For the host, and into memory of the device.
            images = frames_to_images(y, dtype=dtype, patch=size, order=order)
            frames_to_images(y, patch=size, order=order, out=images)
        # Into the memory of a whole video, and with pixels in the channels into new memory.
        frames = pixel_shuffle_3d(y, (1, size, size), order) if size > 1 else y
        pixel_shuffle_3d(y, (1, size, size), order, out=torch.empty_like(frames))
