"""Our VAE as the `first_stage_model` of a `comfy.sd.VAE`: the network's side of the protocol.

Everything that ComfyUI or a pack may call on such a module is here: the plain forms of `encode` and
`decode`, the ones that stream through the output buffer (`comfy_has_chunked_io`), and the tiled
ones (`handles_tiling`). Names and shapes were read off comfy/sd.py of ComfyUI 0.33.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..vae import VAEConfig, VideoVAE
from ..vae.eager import eager
from .progress import Progress, stop_between_layers


class FastVideoVAE(VideoVAE):
    """A `VideoVAE` that ComfyUI can drive.

    Args:
        config: What the weights are.
        dtype: The dtype that it decodes in.
        encode_dtype: The dtype that it encodes in.
        quality: "fast" or "exact", as for `VideoVAE`.

    Attributes:
        comfy_has_chunked_io: Tells ComfyUI that `decode` writes into a buffer of its, and that
            `encode` fetches its input by itself.
        chunk: Latents per step; -1: all; None: chosen from size and memory.
    """

    comfy_has_chunked_io = True

    def __init__(
        self,
        config: VAEConfig,
        dtype: torch.dtype,
        encode_dtype: torch.dtype,
        quality: str = "fast",
    ) -> None:
        super().__init__(config, dtype, encode_dtype, quality)
        self.chunk: int | None = None
        for network in (self.encoder, self.decoder):
            if network is not None:
                stop_between_layers(network)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.conv2.weight.device

    @device.setter
    def device(self, value: torch.device) -> None:
        """ModelPatcher notes here where it has put the weights; they tell by themselves."""

    def decode_output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the frames of a latent: what ComfyUI makes the buffer for `decode` of.

        Args:
            shape: `[B, C_latent, t, h, w]`, or `[B, C_latent, h, w]` for pictures.

        Returns:
            `[B, C, T, H, W]`, or `[B, C, H, W]`.
        """
        if len(shape) == 4:
            one = (*shape[:2], 1, *shape[2:])
            batch, channels, _, height, width = self.config.decoded_shape(one)
            return batch, channels, height, width
        return self.config.decoded_shape(shape)

    @eager
    def decode(
        self, latent: Tensor, output_buffer: Tensor | None = None, **vae_options: object
    ) -> Tensor:
        """Decode a latent.

        Args:
            latent: `[B, C_latent, t, h, w]`, or `[B, C_latent, h, w]`, not normalised.
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
        """Decode without tiles, one latent at a time: exact, and of bounded memory in time.

        Args:
            latent: As for `decode`.
            tile_x: Unused, as are the others: nothing is cut, so that nothing has seams.
            tile_y: Unused.
            overlap: Unused.
            tile_t: Unused.
            overlap_t: Unused.

        Returns:
            As `decode`, channels-last.
        """
        return self._decode(latent, None, 1)

    @eager
    def encode(self, frames: Tensor, device: torch.device | None = None) -> Tensor:
        """Encode frames.

        Args:
            frames: `[B, C, T, H, W]`, or `[B, C, H, W]`, in [-1, 1], on any device. Of `T` only
                `4 n + 1` frames are used.
            device: Where ComfyUI wants the work done; it is done where the weights are, which
                ComfyUI has brought there.

        Returns:
            The mean of the posterior, `[B, C_latent, t, h, w]` or `[B, C_latent, h, w]`.

        Raises:
            ValueError: The frames have another shape or dtype, or are not finite; or the checkpoint
                has no encoder.
        """
        if frames.ndim == 4:
            return self.encode(frames.unsqueeze(2)).squeeze(2)
        frames = self.whole_groups(frames)
        progress = Progress(frames.shape[0] * self.config.latent_frames(frames.shape[2]))
        pieces = []
        for latent in self.encode_stream(frames, self.chunk):
            progress.passed(latent.shape[0] * latent.shape[2])
            pieces.append(latent)
        return torch.cat(pieces, dim=2)

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
        """Encode without tiles: exact, and of bounded memory in time.

        Args:
            frames: As for `encode`.
            tile_x: Unused, as are the others.
            tile_y: Unused.
            overlap: Unused.
            tile_t: Unused.
            overlap_t: Unused.

        Returns:
            As `encode`.
        """
        return self.encode(frames)

    def whole_groups(self, frames: Tensor) -> Tensor:
        """Leave out the frames at the end that do not fill a latent, as ComfyUI does."""
        step = self.config.temporal_compression
        return frames[:, :, : frames.shape[2] - (frames.shape[2] - 1) % step]

    def _decode(self, latent: Tensor, buffer: Tensor | None, chunk: int | None) -> Tensor:
        if latent.ndim == 4:
            grown = None if buffer is None else buffer.unsqueeze(2)
            return self._decode(latent.unsqueeze(2), grown, chunk).squeeze(2)
        self.check_latent(latent)
        if buffer is None:
            buffer = self.new_frames(latent)
        progress = Progress(buffer.shape[0] * buffer.shape[2])
        for piece in self.decode_stream(latent, chunk, out=buffer):
            progress.passed(piece.shape[0] * piece.shape[2])
        return buffer
