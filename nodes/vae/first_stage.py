"""Our VAE as the `first_stage_model` of a `comfy.sd.VAE`: the network's side of the protocol.

Everything that ComfyUI or a pack may call on such a module is here: the plain forms of `encode` and
`decode`, the ones that stream through the output buffer (`comfy_has_chunked_io`), and the tiled
ones (`handles_tiling`). Names and shapes were read off comfy/sd.py of ComfyUI 0.33.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...vae import SEEDVR2, Relief, StreamOptions, VAEConfig, VideoVAE, eager
from ..host.progress import Progress, stop_between_layers


class FastVideoVAE(VideoVAE):
    """A `VideoVAE` that ComfyUI can drive.

    Attributes:
        comfy_has_chunked_io: Tells ComfyUI that `decode` writes into a buffer of its, and that
            `encode` fetches its input by itself.
        chunk: Latents per step; -1: all; None: chosen from size and memory.
        is_seedvr2: The VAE is SeedVR2's, whose module in ComfyUI has forms of its own: it gives the
            bare mean, which ComfyUI scales by `comfy_format_encoded`, without the dimension of
            time where there is one latent; and takes latents of four dimensions with that time in
            their channels.
    """

    comfy_has_chunked_io = True

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, encode_dtype)
        self.chunk: int | None = None
        self.is_seedvr2 = config.family == SEEDVR2
        for network in (self.encoder, self.decoder):
            if network is not None:
                stop_between_layers(network.layers())

    @VideoVAE.device.setter
    def device(self, value: torch.device) -> None:
        """ModelPatcher notes here where it has put the weights; they tell by themselves."""

    def decode_output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `decode`'s buffer: `[B, C, T, H, W]`, or `[B, C, H, W]` for pictures."""
        decoded = self.config.decoded_shape(self.video_shape(shape))
        is_picture = len(shape) == 4 and not self.is_seedvr2
        return (*decoded[:2], *decoded[3:]) if is_picture else decoded

    @eager
    def decode(
        self, latent: Tensor, output_buffer: Tensor | None = None, **vae_options: object
    ) -> Tensor:
        """Decode a latent.

        Args:
            latent: `[B, C_latent, t, h, w]`, or `[B, C_latent, h, w]` for pictures (of SeedVR2
                `[B, C_latent * t, h, w]` for videos), not normalised, as in a LATENT.
            output_buffer: Where to write the frames, of any dtype, strides and device; None: a new
                tensor, channels-last, on the device.
            vae_options: Options of other VAEs, which mean nothing here.

        Returns:
            The buffer, of the shape that `decode_output_shape` gives, in about [-1, 1].

        Raises:
            ValueError: The latent has another shape or dtype, or is not finite.
        """
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
        """`decode` in exact tiles of so many latents, one latent at a time, channels-last.

        Of SeedVR2, which is never cut, a step may take the memory of such a tile. The overlap is
        unused, as is the time: a tile has the halo that it needs.
        """
        single_frame = self.video_shape(latent.shape)[2:3] == (1,)
        step = self.config.spatial_compression * self.config.output_scale
        tile = tile_size(tile_x, tile_y)
        limit = self.tile_limit(tile, single_frame=single_frame)
        return self._decode(latent, None, 1, limit, tile and (tile[0] * step, tile[1] * step))

    @eager
    def encode(self, frames: Tensor, device: torch.device | None = None) -> Tensor:
        """Encode frames `[B, C, T, H, W]`, or `[B, C, H, W]`, in [-1, 1], on any device.

        Of `T` only `4 n + 1` frames are used. The work is done where the weights are: ComfyUI has
        brought them to the `device` where it wants it.

        Returns:
            The mean of the posterior, not scaled, `[B, C_latent, t, h, w]`, or `[B, C_latent, h,
            w]` where there were four dimensions (of SeedVR2: where there is one latent).

        Raises:
            ValueError: The frames have another shape or dtype, or are not finite; or the checkpoint
                has no encoder.
        """
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
        """`encode` in exact tiles of so many pixels; of SeedVR2 always with five dimensions."""
        step = self.config.spatial_compression
        single_frame = frames.ndim == 4 or frames.shape[2] <= self.config.temporal_compression
        tile = tile_size(tile_x, tile_y)
        latents = tile and (tile[0] // step, tile[1] // step)
        limit = self.tile_limit(latents, encode=True, single_frame=single_frame)
        latent = self._encode(frames, limit, tile)
        return latent.squeeze(2) if frames.ndim == 4 and not self.is_seedvr2 else latent

    def comfy_format_encoded(self, latent: Tensor) -> Tensor:
        """What a LATENT holds: what `encode` gave, scaled, and with the dimension of time."""
        video = latent.unsqueeze(2) if latent.ndim == 4 else latent
        return video * self.config.latent_scale

    def tile_limit(
        self, tile: tuple[int, int] | None, *, encode: bool = False, single_frame: bool = False
    ) -> int | None:
        """Bytes of the shortest steps on a tile of so many latents, where tiles are not to be had.

        The norms of SeedVR2 are over the whole frame, so that its tiles differ from it however far
        they overlap. None for other VAEs, or without a size.
        """
        if tile is None or not self.is_seedvr2:
            return None
        height, width = (max(1, side) * self.config.spatial_compression for side in tile)
        least = StreamOptions(limit_bytes=1)
        return self.plan(height, width, least, encode=encode, single_frame=single_frame).peak_bytes

    def video_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`[B, C_latent, t, h, w]` for the shape of a latent of four or five dimensions."""
        if len(shape) != 4:
            return tuple(shape)
        batch, channels, height, width = shape
        latents = self.config.latent_channels
        if self.is_seedvr2 and channels and channels % latents == 0:
            return batch, latents, channels // latents, height, width
        return batch, channels, 1, height, width

    def whole_groups(self, frames: Tensor) -> Tensor:
        """Leave out the frames at the end that do not fill a latent, as ComfyUI does."""
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
            relief = Relief(self.device, "a decode")
            buffer = relief.finish(lambda: self.new_frames(latent))
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
        """The means, `[B, C_latent, t, h, w]`."""
        frames = self.whole_groups(frames.unsqueeze(2) if frames.ndim == 4 else frames)
        progress = Progress(frames.shape[0] * self.config.latent_frames(frames.shape[2]))
        options = StreamOptions(self.chunk, limit_bytes=limit_bytes, tile=tile)
        pieces = list(progress.counted(self.encode_stream(frames, options, scaled=False)))
        return Relief(self.device, "an encode").finish(lambda: torch.cat(pieces, dim=2))


def tile_size(tile_x: int | None, tile_y: int | None) -> tuple[int, int] | None:
    """Height and width of a tile; None: it has no size."""
    return None if tile_x is None or tile_y is None else (tile_y, tile_x)
