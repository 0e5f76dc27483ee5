"""The fast VAE behind ComfyUI's VAE protocol: a `comfy.sd.VAE` for any node.

It decodes and encodes piece by piece, from the latent into the IMAGE and back, instead of holding a
video twice on the device; `accelerate.py` creates it. Facts about ComfyUI here are from comfy/sd.py
of 0.33.
"""

import functools
from collections.abc import Callable

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...vae import StreamOptions, retried
from ..host import timing
from ..host.error_text import about
from ..host.oom import give_back, in_turn, kept
from ..host.progress import Progress
from . import pieces
from .first_stage import FastVideoVAE, tile_size


def one_video(vae: object, latent: Tensor) -> Tensor:
    """Return a LATENT's one video as `[1, C_latent, t, h, w]`; unchanged if the VAE is not fast."""
    if latent.is_nested:
        latent = latent.unbind()[0]
    if isinstance(vae, FastVAE):
        model = vae.first_stage_model
        latent = latent.reshape(model.video_shape(latent.shape))
        with about("samples"):
            model.check_latent(latent)
        if vae.latent_dim == 2:  # pictures, which become the frames
            latent = latent[:, :, 0].movedim(0, 1).unsqueeze(0)
    if latent.ndim == 5 and len(latent) != 1:
        raise ValueError(
            f"samples: got {len(latent)} videos; expected one, as from Latent From Batch"
        )
    return latent


# Unknown arguments, such as an option of a newer ComfyUI, are passed to ComfyUI's own methods,
# which use the same network.
class FastVAE(comfy.sd.VAE):
    """A `comfy.sd.VAE` around a `FastVideoVAE`; not created by calling this class."""

    first_stage_model: FastVideoVAE

    # It belongs to the current network, because ComfyUI replaces the network in copies.
    @property
    def format_encoded(self) -> Callable[[Tensor], Tensor] | None:
        """Conversion of the network's output for ComfyUI's methods; None: not needed."""
        model = self.first_stage_model
        return model.comfy_format_encoded if model.is_seedvr2 else None

    def decode(
        self,
        samples_in: Tensor,
        vae_options: dict[str, object] | None = None,
        *,
        options: StreamOptions = pieces.AUTOMATIC,
        tile: tuple[int, int] | None = None,
        **newer: object,
    ) -> Tensor:
        """Decode latents to an IMAGE `[B, T, H, W, C]` or `[B, H, W, C]` in [0, 1]."""
        if newer:
            return super().decode(samples_in, vae_options or {}, **newer)
        self.throw_exception_if_invalid()
        model = self.first_stage_model
        latent = samples_in.reshape(model.video_shape(samples_in.shape))
        model.check_latent(latent)
        if self.latent_dim == 2:  # as in ComfyUI
            latent = latent[:, :, :1]
        try:
            with timing.span("VAE decode", pieces.label(self), self.device):
                images = self._decode(latent, options, tile)
        finally:
            give_back(self.device)
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
        if newer:
            return super().decode_tiled(
                samples, tile_x, tile_y, overlap, tile_t, overlap_t, **newer
            )
        return self.decode(samples, tile=tile_size(tile_x, tile_y))

    def encode(
        self,
        pixel_samples: Tensor,
        not_video: bool | None = None,
        *,
        options: StreamOptions = pieces.AUTOMATIC,
        tile: tuple[int, int] | None = None,
        **newer: object,
    ) -> Tensor:
        """Encode an IMAGE `[N, H, W, C]`, or `[B, T, H, W, C]`; None: `not_video` is the VAE's."""
        if newer:
            return super().encode(pixel_samples, not_video=bool(not_video), **newer)
        self.throw_exception_if_invalid()
        not_video = self.not_video if not_video is None else not_video
        view = lambda: self._as_video(pixel_samples, not_video)  # noqa: E731
        video = retried(view, self.device, "an encode", pieces.release(self))
        work = lambda _: self._encode(video, options, tile)  # noqa: E731
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
        if newer:
            return super().encode_tiled(
                pixel_samples, tile_x, tile_y, overlap, tile_t, overlap_t, **newer
            )
        step, tile = self.spacial_compression_encode(), tile_size(tile_x, tile_y)
        return self.encode(pixel_samples, tile=tile and (tile[0] // step, tile[1] // step))

    def memory_used_decode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the bytes for decoding one latent of the batch of `shape`; `dtype` is ignored."""
        return pieces.decode_bytes(self, shape)

    def memory_used_encode(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the bytes for encoding one video of the batch of `shape`; `dtype` is ignored."""
        return pieces.encode_bytes(self, shape)

    def vae_encode_crop_pixels(self, pixels: Tensor) -> Tensor:
        """Crop `pixels` `[..., H, W, C]` about the center in space only; drop or add channels."""
        if pixels.ndim < 5:
            return super().vae_encode_crop_pixels(pixels)
        # A batch of videos would be cropped in time too.
        pictures = super().vae_encode_crop_pixels(pixels.flatten(0, -4))
        return pictures.unflatten(0, pixels.shape[:-3])

    def get_sd(self) -> dict[str, Tensor]:
        """Return the weights `[...]` by name, in the memory order of files."""
        weights = super().get_sd()
        return {
            key: value if value.is_contiguous() else value.cpu().contiguous()
            for key, value in weights.items()
        }

    def _decode(
        self, latent: Tensor, options: StreamOptions, tile: tuple[int, int] | None
    ) -> Tensor:
        """Stream `[B, C_latent, t, h, w]` into a new IMAGE."""
        options = pieces.options_for(self, options, tile, single_frame=latent.shape[2] == 1)
        needed = pieces.decode_bytes(self, latent.shape, options)
        together = self._together(needed, latent, options)
        shape = self.first_stage_model.config.decoded_shape(latent.shape)
        batch, channels, frames, height, width = shape

        def empty() -> Tensor:
            size = batch, frames, height, width, channels
            return torch.empty(size, device=self.output_device, dtype=self.vae_output_dtype())

        with kept():
            images = retried(empty, self.device, "a decode", options.release)
        progress = Progress(batch * frames)
        for part, out in zip(latent.split(together), images.split(together), strict=True):
            stream = pieces.decode_pieces(self, part, options, images=out)
            for _ in progress.counted(stream, are_images=True):
                pass
        return images

    def _encode(
        self, video: Tensor, options: StreamOptions, tile: tuple[int, int] | None
    ) -> Tensor:
        """Stream `[B, C, T, H, W]` in [0, 1] into new latents."""
        batch, _, frames, height, width = video.shape
        options = pieces.options_for(self, options, tile, encode=True, single_frame=frames == 1)
        pieces.log_cut(self, height, width)
        model = self.first_stage_model
        needed = pieces.encode_bytes(self, video.shape, options)
        pieces.load(self, needed)
        progress = Progress(batch * model.config.latent_frames(frames))
        encode = functools.partial(model.encode_stream, scaled=False, to_range=self.process_input)
        parts = video.split(self._together(needed, video, options))
        means = [pieces.moved(self, progress.counted(encode(part, options))) for part in parts]
        return retried(lambda: torch.cat(means), self.device, "an encode", options.release)

    def _together(self, memory_bytes: int, batch: Tensor, options: StreamOptions) -> int:
        """Return how many of a batch run at once: one video, or images as GPU memory allows."""
        if options.limit_bytes is not None or batch.shape[2] > 1 or self.device.type == "cpu":
            return 1
        _, *others = pieces.devices(self)
        free = [self.patcher.get_free_memory(self.device)]
        free += [comfy.model_management.get_free_memory(each) for each in others]
        return max(1, int(min(free) / max(1, memory_bytes)))

    def _as_video(self, pixels: Tensor, not_video: bool) -> Tensor:
        """Crop an IMAGE and view it as `[B, C, T, H, W]` in [0, 1]."""
        if pixels.ndim not in (4, 5):
            raise ValueError(f"pixels is {list(pixels.shape)}; expected [N, H, W, C]")
        step = self.spacial_compression_encode()
        if min(pixels.shape[-3:-1]) < step:
            height, width = pixels.shape[-3:-1]
            raise ValueError(
                f"pixels is {height} x {width} (H x W); expected at least {step} x {step}"
            )
        channels_first = self.vae_encode_crop_pixels(pixels).movedim(-1, 1)
        if pixels.ndim == 5:
            video = channels_first
        elif not_video or self.latent_dim == 2:
            video = channels_first.unsqueeze(2)
        else:
            video = channels_first.movedim(0, 1).unsqueeze(0)
        if not video.is_floating_point():
            raise ValueError(f"pixels is {pixels.dtype}; expected a float dtype in [0, 1]")
        self.first_stage_model.check_frames(video, self.device)
        return self.first_stage_model.whole_groups(video)
