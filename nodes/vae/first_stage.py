"""The fast VAE as the `first_stage_model` of a `comfy.sd.VAE`.

It has everything that ComfyUI or a pack may call on such a module: the plain `encode` and `decode`,
the ones that stream through an output buffer (`comfy_has_chunked_io`), and the tiled ones
(`handles_tiling`). Names and shapes are from comfy/sd.py of ComfyUI 0.33.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...vae import SEEDVR2, StreamOptions, VAEConfig, VideoVAE, eager, retried
from ..host.devices import ONE
from ..host.progress import Progress, stop_between_layers

# Nodes of ComfyUI that make latents for a family; for the others none does from nothing.
_MAKERS = {"wan2.1": "EmptyHunyuanLatentVideo", "wan2.2": "Wan22ImageToVideoLatent"}


class FastVideoVAE(VideoVAE):
    """A `VideoVAE` that ComfyUI can use."""

    # `decode` writes into ComfyUI's buffer, and `encode` fetches its own input.
    comfy_has_chunked_io = True

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, encode_dtype)
        self.chunk: int | None = None  # latents per step; -1: all
        self.selection = ONE
        self._asked: list[torch.device] = []
        # ComfyUI's module of SeedVR2 differs: it returns the unscaled mean, without the time
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

    def decode_output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the decoded shape of `shape`: `[B, C, T, H, W]`, images `[B, C, H, W]`."""
        decoded = self.config.decoded_shape(self.video_shape(shape))
        is_picture = len(shape) == 4 and not self.is_seedvr2
        return (*decoded[:2], *decoded[3:]) if is_picture else decoded

    @eager
    def decode(
        self, latent: Tensor, output_buffer: Tensor | None = None, **vae_options: object
    ) -> Tensor:
        """Decode `[B, C_latent, t, h, w]` or `[B, C_latent, h, w]`, into a buffer if given."""
        return self._decode(latent, output_buffer, self.chunk)

    @eager
    def decode_tiled(
        self,
        latent: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """Decode in exact tiles, given in latents, one latent per step; overlaps are ignored."""
        single_frame = self.video_shape(latent.shape)[2:3] == (1,)
        step = self.config.spatial_compression * self.config.output_scale
        tile = tile_size(tile_x, tile_y)
        limit = self.tile_limit(tile, single_frame=single_frame)
        return self._decode(latent, None, 1, limit, tile and (tile[0] * step, tile[1] * step))

    @eager
    def encode(self, frames: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the unscaled means `[B, C_latent, t, h, w]` of `[B, C, T, H, W]` in [-1, 1]."""
        latent = self._encode(frames)
        is_flat = latent.shape[2] == 1 if self.is_seedvr2 else frames.ndim == 4
        return latent.squeeze(2) if is_flat else latent

    @eager
    def encode_tiled(
        self,
        frames: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """Encode in exact tiles, given in pixels; for SeedVR2 always with five dimensions."""
        step = self.config.spatial_compression
        single_frame = frames.ndim == 4 or frames.shape[2] <= self.config.temporal_compression
        tile = tile_size(tile_x, tile_y)
        latents = tile and (tile[0] // step, tile[1] // step)
        limit = self.tile_limit(latents, encode=True, single_frame=single_frame)
        latent = self._encode(frames, limit, tile)
        return latent.squeeze(2) if frames.ndim == 4 and not self.is_seedvr2 else latent

    def comfy_format_encoded(self, latent: Tensor) -> Tensor:
        """Return the output of `encode`, scaled, as a LATENT's `[B, C_latent, t, h, w]`."""
        video = latent.unsqueeze(2) if latent.ndim == 4 else latent
        return video * self.config.latent_scale

    # The norms of SeedVR2 are over the whole frame, so its tiles would differ for any overlap.
    def tile_limit(
        self, tile: tuple[int, int] | None, *, encode: bool = False, single_frame: bool = False
    ) -> int | None:
        """Return the bytes of the shortest steps on a tile in latents.

        None: there is no tile, or the VAE can be tiled.
        """
        if tile is None or not self.is_seedvr2:
            return None
        height, width = (max(1, side) * self.config.spatial_compression for side in tile)
        least = StreamOptions(limit_bytes=1)
        return self.plan(height, width, least, encode=encode, single_frame=single_frame).peak_bytes

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

    def _decode(
        self,
        latent: Tensor,
        buffer: Tensor | None,
        chunk: int | None,
        limit_bytes: int | None = None,
        tile: tuple[int, int] | None = None,
    ) -> Tensor:
        if latent.ndim == 4:
            video = latent.reshape(self.video_shape(latent.shape))
            if self.is_seedvr2:
                return self._decode(video, buffer, chunk, limit_bytes, tile)
            grown = None if buffer is None else buffer.unsqueeze(2)
            return self._decode(video, grown, chunk, limit_bytes, tile).squeeze(2)
        self.check_latent(latent)
        if buffer is None:
            buffer = retried(lambda: self.new_frames(latent), self.device, "a decode")
        progress = Progress(buffer.shape[0] * buffer.shape[2])
        options = StreamOptions(chunk, limit_bytes=limit_bytes, tile=tile)
        for _ in progress.counted(self.decode_stream(latent, options, out=buffer)):
            pass
        return buffer

    def _encode(
        self,
        frames: Tensor,
        limit_bytes: int | None = None,
        tile: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the means, `[B, C_latent, t, h, w]`."""
        frames = self.whole_groups(frames.unsqueeze(2) if frames.ndim == 4 else frames)
        progress = Progress(frames.shape[0] * self.config.latent_frames(frames.shape[2]))
        options = StreamOptions(self.chunk, limit_bytes=limit_bytes, tile=tile)
        stream = self.encode_stream(frames, options, scaled=False)
        return self.joined(list(progress.counted(stream)))


def tile_size(tile_x: int | None, tile_y: int | None) -> tuple[int, int] | None:
    """Return height and width of a tile from `tile_x` and `tile_y`; None: no tile."""
    return None if tile_x is None or tile_y is None else (tile_y, tile_x)
