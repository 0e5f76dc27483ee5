"""The fast VAE behind ComfyUI's VAE protocol: a `comfy.sd.VAE` for any node.

It decodes and encodes piece by piece, from the latent into the IMAGE and back, instead of holding a
video twice on the device; `accelerate.py` creates it. Facts about ComfyUI here are from comfy/sd.py
of 0.33.
"""

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...kernels import first_line, log_once
from ...vae import SEEDVR2, StreamOptions, VAEConfig, VideoVAE, retried
from ..host import timing
from ..host.devices import ONE
from ..host.error_text import about, described
from ..host.latents import first_of
from ..host.oom import in_turn, kept
from ..host.progress import Progress, stop_between_layers
from . import pieces

# Nodes of ComfyUI that make latents for a family; for the others none does from nothing.
_MAKERS = {"wan2.1": "EmptyHunyuanLatentVideo", "wan2.2": "Wan22ImageToVideoLatent"}


def one_video(vae: object, latent: Tensor) -> Tensor:
    """Return a LATENT's one video as `[1, C_latent, t, h, w]`; unchanged if the VAE is not fast."""
    latent = first_of(latent)
    if isinstance(vae, FastVAE):
        latent = vae.first_stage_model.as_video(latent)
        with about("samples"):
            vae.first_stage_model.check_latent(latent)
        if vae.latent_dim == 2:  # pictures, which become the frames
            latent = latent[:, :, 0].movedim(0, 1).unsqueeze(0)
    if latent.ndim == 5 and len(latent) != 1:
        got = f"samples: got {len(latent)} videos"
        raise ValueError(f"{got}; expected one, as from Latent From Batch")
    return latent


def by_another(vae: Any, task: str, given: Tensor, name: str) -> Tensor:  # noqa: ANN401, any VAE
    """Run the method `task` of another kind of VAE on a latent or IMAGE; errors name the input."""
    management = comfy.model_management
    try:
        with timing.span(f"VAE {task}"):
            return getattr(vae, task)(given)
    except Exception as error:
        # ComfyUI handles the user's stop, and unloads models when memory runs out.
        if isinstance(error, management.InterruptProcessingException) or management.is_oom(error):
            raise
        # With the traceback of the failure, which ComfyUI shows below the message.
        raise ValueError(
            f"{name}: this VAE, which is not a fast one, {task}s no "
            f"{described(given).partition(' ')[2]}: {type(error).__name__}: {first_line(error)}"
        ).with_traceback(error.__traceback__) from error


# An option of a newer ComfyUI is named in the log and has no effect: ComfyUI's own methods, which
# know it, would decode with seams where memory is short.
class FastVAE(comfy.sd.VAE):
    """A `comfy.sd.VAE` around a `FastVideoVAE`; not created by calling this class."""

    first_stage_model: "FastVideoVAE"

    def decode(
        self,
        samples_in: Tensor,
        vae_options: dict[str, object] | None = None,
        *,
        options: StreamOptions = pieces.AUTOMATIC,
        tile: tuple[int, int] | None = None,
        frames: range | None = None,
        **newer: object,
    ) -> Tensor:
        """Decode latents to an IMAGE `[B, T, H, W, C]` or `[B, H, W, C]` in [0, 1].

        `frames` are those of each video to decode; of a VAE of pictures, the pictures.
        """
        log_ignored("decode", {**(vae_options or {}), **newer})
        self.throw_exception_if_invalid()
        model = self.first_stage_model
        latent = model.as_video(samples_in)
        model.check_latent(latent)
        if self.latent_dim == 2:  # as in ComfyUI
            latent = latent[:, :, :1]
            latent, frames = latent if frames is None else latent[frames.start : frames.stop], None
        batch, channels, count, height, width = model.config.decoded_shape(latent.shape)
        count = count if frames is None else len(frames)
        size, dtype = (batch, count, height, width, channels), self.vae_output_dtype()
        empty = lambda: torch.empty(size, device=self.output_device, dtype=dtype)  # noqa: E731
        with timing.span("VAE decode", pieces.label(self), self.device):
            with kept():
                images = retried(empty, self.device, "a decode", pieces.release(self))
            stream = pieces.decode_pieces(self, latent, options, tile, frames=frames, images=images)
            for _ in Progress(batch * count).counted(stream, are_images=True):
                pass
        is_flat = self.latent_dim == 2 or samples_in.ndim == 4
        return images.squeeze(1) if is_flat and not model.is_seedvr2 else images

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
        **newer: object,
    ) -> Tensor:
        """Decode in exact tiles, given in latents; the result is that of `decode`.

        Overlaps and `tile_t` are ignored: a tile has the halo that it needs.
        """
        return self.decode(samples, tile=_tile(tile_x, tile_y), **newer)

    def encode(
        self,
        pixel_samples: Tensor,
        not_video: bool | None = None,
        *,
        options: StreamOptions = pieces.AUTOMATIC,
        tile: tuple[int, int] | None = None,
        corrections: int = 0,
        **newer: object,
    ) -> Tensor:
        """Encode an IMAGE `[N, H, W, C]`, or `[B, T, H, W, C]`; None: `not_video` is the VAE's.

        `corrections` are those of `encode_corrected`.
        """
        log_ignored("encode", newer)
        self.throw_exception_if_invalid()
        not_video = self.not_video if not_video is None else not_video
        view = lambda: self._as_video(pixel_samples, not_video)  # noqa: E731
        video = retried(view, self.device, "an encode", pieces.release(self))
        work = lambda _: pieces.encoded(self, video, options, tile, corrections)  # noqa: E731
        with timing.span("VAE encode", pieces.label(self), self.device):
            try:
                latents = in_turn(self.device, "an encode", work)
            except ValueError:  # a stream does not know the place of its values in the whole
                self.first_stage_model.check_frames(video, torch.device("cpu"))
                raise
        return latents.squeeze(2) if self.latent_dim == 2 else latents

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
        **newer: object,
    ) -> Tensor:
        """Encode in exact tiles, given in pixels; the result is that of `encode`."""
        step = self.spacial_compression_encode()
        return self.encode(pixel_samples, tile=_tile(tile_x, tile_y, step), **newer)

    def memory_used_decode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the bytes for decoding one latent of the batch of `shape`; `dtype` is ignored."""
        return pieces.work_bytes(self, shape)

    def memory_used_encode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the bytes for encoding one video of the batch of `shape`; `dtype` is ignored."""
        return pieces.work_bytes(self, shape, encode=True)

    def get_sd(self) -> dict[str, Tensor]:
        """Return the weights `[...]` by name, in the memory order of files."""
        weights = super().get_sd()
        return {
            key: value if value.is_contiguous() else value.cpu().contiguous()
            for key, value in weights.items()
        }

    def _as_video(self, pixels: Tensor, not_video: bool) -> Tensor:
        """Crop an IMAGE about the center in space and view it as `[B, C, T, H, W]` in [0, 1]."""
        if pixels.ndim not in (4, 5):
            raise ValueError(f"pixels is {list(pixels.shape)}; expected [N, H, W, C]")
        (height, width), step = pixels.shape[-3:-1], self.spacial_compression_encode()
        if min(height, width) < step:
            raise ValueError(
                f"pixels is {height} x {width} (H x W); expected at least {step} x {step}"
            )
        # ComfyUI would crop a batch of videos in time too.
        pictures = self.vae_encode_crop_pixels(pixels.flatten(0, -4)).movedim(-1, 1)
        if pixels.ndim == 5:
            video = pictures.unflatten(0, pixels.shape[:2]).movedim(1, 2)
        elif not_video or self.latent_dim == 2:
            video = pictures.unsqueeze(2)
        else:
            video = pictures.movedim(0, 1).unsqueeze(0)
        if not video.is_floating_point():
            raise ValueError(f"pixels is {pixels.dtype}; expected a float dtype in [0, 1]")
        self.first_stage_model.check_frames(video, self.device)
        return self.first_stage_model.whole_groups(video)


def _tile(tile_x: int | None, tile_y: int | None, step: int = 1) -> tuple[int, int] | None:
    """Return height and width of a tile in latents of `step` units; None: no tile."""
    return None if tile_x is None or tile_y is None else (tile_y // step, tile_x // step)


# Its methods are for packs that call `vae.first_stage_model` themselves: they take and return what
# ComfyUI's own networks do (comfy/ldm/wan and comfy/ldm/seedvr).
class FastVideoVAE(VideoVAE):
    """A `VideoVAE` in the place of one of ComfyUI's networks, with the settings of its loader."""

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, encode_dtype)
        self.chunk: int | None = None  # latents per step; -1: all
        self.selection = ONE
        self._asked: list[torch.device] = []
        # ComfyUI's network of SeedVR2 differs: it returns the unscaled mean, without the time
        # dimension for a single latent, and takes latents `[B, C_latent * t, h, w]`.
        self.is_seedvr2 = config.family == SEEDVR2
        self.sources = "Load VAE (Fast)", _MAKERS.get(config.family, "VAE Encode (Fast)")
        for network in (self.encoder, self.decoder):
            if network is not None:
                stop_between_layers(network.layers())

    @VideoVAE.device.setter
    def device(self, value: torch.device) -> None:
        """Ignore `value`, the device that ModelPatcher notes; the weights have it."""

    @property
    def shared_by(self) -> list[torch.device]:
        """The devices of `share`, as they were named; empty: the VAE's own, as in a copied VAE."""
        return self._asked if self.devices else []

    def share(self, devices: Sequence[torch.device]) -> None:
        """Share each video among `devices`, the VAE's own first; one of them computes it alone."""
        wanted = list(devices) if len(devices) > 1 else []
        # The same devices are not set again, because that tries those that have failed once more.
        if wanted != self.shared_by:
            self._asked = self.devices = wanted

    def decode(self, latent: Tensor, chunk: int | None = None, **options: object) -> Tensor:
        """Decode as ComfyUI's network: latents without time become pictures without time."""
        log_ignored("decode", options)
        frames = super().decode(self.as_video(latent), chunk or self.chunk)
        return frames.squeeze(2) if latent.ndim == 4 and not self.is_seedvr2 else frames

    def encode(self, frames: Tensor, chunk: int | None = None, **options: object) -> Tensor:
        """Encode frames in [-1, 1] as ComfyUI's network: to unscaled means, on any `device`."""
        log_ignored("encode", {name: each for name, each in options.items() if name != "device"})
        video = self.whole_groups(frames.unsqueeze(2) if frames.ndim == 4 else frames)
        stream = self.encode_stream(video, StreamOptions(chunk or self.chunk), scaled=False)
        means = self.joined(list(stream))
        is_flat = means.shape[2] == 1 if self.is_seedvr2 else frames.ndim == 4
        return means.squeeze(2) if is_flat else means

    def as_video(self, latent: Tensor) -> Tensor:
        """Return a latent with or without time as `[B, C_latent, t, h, w]`."""
        return latent.reshape(self.video_shape(latent.shape))

    def video_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return `[B, C_latent, t, h, w]` for the `shape` of a latent with or without time."""
        if len(shape) != 4:
            return tuple(shape)
        batch, channels, height, width = shape
        latents = self.config.latent_channels
        if self.is_seedvr2 and channels and channels % latents == 0:
            return batch, latents, channels // latents, height, width
        return batch, channels, 1, height, width

    def whole_groups(self, frames: Tensor) -> Tensor:
        """Drop the last of `frames` `[B, C, T, H, W]` that do not fill a latent, like ComfyUI."""
        step = self.config.temporal_compression
        return frames[:, :, : frames.shape[2] - (frames.shape[2] - 1) % step]


def log_ignored(task: str, options: dict[str, object]) -> None:
    """Log once the names of options that no VAE of ComfyUI 0.33 or of this pack has."""
    if options:
        names = ", ".join(sorted(options))
        log_once(f"a fast VAE does not know this option of {task}, and ignores it: {names}")
