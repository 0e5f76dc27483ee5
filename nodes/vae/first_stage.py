"""The network of a fast VAE, with the settings of its loader.

ComfyUI's nodes call `comfy_vae.FastVAE`, which streams. The methods of the network are for packs
that call `vae.first_stage_model` themselves: they take and return what ComfyUI's own networks do
(comfy/ldm/wan and comfy/ldm/seedvr of 0.33).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import log_once
from ...vae import SEEDVR2, StreamOptions, VAEConfig, VideoVAE
from ..host.devices import ONE
from ..host.progress import stop_between_layers

# Nodes of ComfyUI that make latents for a family; for the others none does from nothing.
_MAKERS = {"wan2.1": "EmptyHunyuanLatentVideo", "wan2.2": "Wan22ImageToVideoLatent"}


class FastVideoVAE(VideoVAE):
    """A `VideoVAE` in the place of one of ComfyUI's networks."""

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
