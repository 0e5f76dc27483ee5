"""Our VAE behind ComfyUI's VAE protocol: a `comfy.sd.VAE` that any node can use.

It decodes and encodes piece by piece, from the latent into the IMAGE and back, instead of holding a
video twice on the device; `swap.py` makes it. What is said of ComfyUI here was read off comfy/sd.py
and comfy/model_management.py of 0.33.
"""

import functools
from collections.abc import Callable, Iterator

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from .first_stage import FastVideoVAE
from .memory import first_that_fits, give_back, kept
from .progress import Progress

# Memory that is asked of ComfyUI for the longest steps; with less they are shorter, not slower by
# much. More would push the diffusion model out for nothing.
_LIMIT_BYTES = 4 << 30

# Where nothing else fits: tiles of so many latents a side, one size after the other. Of SeedVR2,
# which cannot be cut, no more than the memory that they would take.
_TILES = (64, 32, 16)


class FastVAE(comfy.sd.VAE):
    """A `comfy.sd.VAE` around a `FastVideoVAE`; never made by a call of this class.

    What it does not know of, such as an option of a newer ComfyUI, goes to ComfyUI's own methods,
    which drive the same network.
    """

    first_stage_model: FastVideoVAE

    @property
    def format_encoded(self) -> Callable[[Tensor], Tensor] | None:
        """What ComfyUI's own methods make a LATENT with, of what the network gives; None: nothing.

        It belongs to the network that there is now: ComfyUI puts another one into copies.
        """
        model = self.first_stage_model
        return model.comfy_format_encoded if model.is_seedvr2 else None

    def decode(
        self,
        samples_in: Tensor,
        vae_options: dict[str, object] | None = None,
        *,
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        tiles: tuple[int, int, int] | None = None,
        **newer: object,
    ) -> Tensor:
        """Decode latents into an IMAGE.

        Args:
            samples_in: `[B, C_latent, t, h, w]`, or `[B, C_latent, h, w]` for pictures (of SeedVR2
                `[B, C_latent * t, h, w]` for videos), not normalised.
            vae_options: Options of other VAEs, which mean nothing here.
            chunk: Latents per step; -1: all; None: as chosen for the VAE.
            dtype: Of this decode; None: that of the VAE.
            tiles: Width, height and overlap, in latents, of the tiles that are the last resort when
                memory runs out; of SeedVR2, which is never cut, the size whose memory is the limit.
            newer: What a newer ComfyUI may say.

        Returns:
            `[B, T, H, W, C]`, or `[B, H, W, C]` for pictures, contiguous, in [0, 1] on the output
            device.

        Raises:
            ValueError: The latents have another shape or dtype, or are not finite.
        """
        if newer:
            return super().decode(samples_in, vae_options or {}, **newer)
        if self.latent_dim == 2 and samples_in.ndim == 5:
            samples_in = samples_in[:, :, 0]
        self.throw_exception_if_invalid()
        model = self.first_stage_model
        latent = samples_in.reshape(model.video_shape(samples_in.shape))
        images = self._decoded(latent, chunk=chunk, dtype=dtype, tiles=tiles)
        return images.squeeze(1) if samples_in.ndim == 4 and not model.is_seedvr2 else images

    def _decoded(
        self,
        latent: Tensor,
        *,
        chunk: int | None,
        dtype: torch.dtype | None,
        tiles: tuple[int, int, int] | None,
    ) -> Tensor:
        """Check `[B, C_latent, t, h, w]` and decode it in the first way that fits."""
        model = self.first_stage_model
        model.check_latent(latent)
        way = functools.partial(self._decode, latent, chunk, dtype)
        if model.is_seedvr2:
            limits = self._limits(tiles and tiles[:2], lone=latent.shape[2] == 1)
            return self._first("decode", [functools.partial(way, limit) for limit in limits])
        sizes = [(size, size, size // 4) for size in _TILES] if tiles is None else [tiles]
        cut = [functools.partial(self._decode_in_tiles, latent, *size) for size in sizes]
        return self._first("decode", [way, way, *cut])

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
        """Decode latents into an IMAGE, without tiles as long as that fits.

        Nothing is cut in time, because the stream is exact and its memory bounded.

        Args:
            samples: As for `decode`.
            tile_x: Width of a tile in latents, should memory run out; of SeedVR2, which is never
                cut, a step may take the memory of such a tile.
            tile_y: Height of one.
            overlap: Latents by which they overlap.
            tile_t: Unused.
            overlap_t: Unused.
            newer: What a newer ComfyUI may say.

        Returns:
            As `decode`.
        """
        if newer:
            return super().decode_tiled(
                samples, tile_x, tile_y, overlap, tile_t, overlap_t, **newer
            )
        if tile_x is None or tile_y is None:
            return self.decode(samples)
        size = (tile_x, tile_y, min(tile_x, tile_y) // 4 if overlap is None else overlap)
        return self.decode(samples, tiles=size)

    def encode(
        self,
        pixel_samples: Tensor,
        not_video: bool | None = None,
        *,
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        tile: tuple[int, int] | None = None,
        **newer: object,
    ) -> Tensor:
        """Encode an IMAGE.

        Args:
            pixel_samples: `[N, H, W, C]` in [0, 1], or `[B, T, H, W, C]`. Height and width are
                cropped about the centre to what the VAE compresses, frames to `4 n + 1`.
            not_video: The `N` images are pictures, not the frames of one video; None: as the VAE
                says.
            chunk: Latents per step; -1: all; None: as chosen for the VAE.
            dtype: Of this encode; None: that of the VAE.
            tile: Width and height, in latents, of the size whose memory is the limit of SeedVR2.
            newer: What a newer ComfyUI may say.

        Returns:
            `[B, C_latent, t, H / 8, W / 8]`, or `[N, C_latent, H / 16, W / 16]` of a VAE of
            pictures; not normalised (of SeedVR2 scaled), on the output device.

        Raises:
            ValueError: The images have another shape or dtype, or are not finite; or the VAE has no
                encoder.
        """
        if newer:
            return super().encode(pixel_samples, not_video=bool(not_video), **newer)
        self.throw_exception_if_invalid()
        video = self._as_video(pixel_samples, self.not_video if not_video is None else not_video)
        way = functools.partial(self._encode, video, chunk, dtype)
        if self.first_stage_model.is_seedvr2:
            limits = self._limits(tile, encode=True, lone=video.shape[2] == 1)
            return self._first("encode", [functools.partial(way, limit) for limit in limits])
        if self.latent_dim == 2:
            tiled = functools.partial(self.encode_tiled_, video[:, :, 0])
            return self._first("encode", [way, way, lambda: tiled().unsqueeze(2)]).squeeze(2)
        return self._first("encode", [way, way, functools.partial(self.encode_tiled_3d, video)])

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
        """Encode an IMAGE, without tiles as long as that fits.

        Args:
            pixel_samples: As for `encode`.
            tile_x: Width of a tile in pixels. Nothing is cut; of SeedVR2 a step may take the memory
                of such a tile.
            tile_y: Height of one.
            overlap: Unused, as are the others: the stream is exact and its memory bounded.
            tile_t: Unused.
            overlap_t: Unused.
            newer: What a newer ComfyUI may say.

        Returns:
            As `encode`.
        """
        if newer:
            return super().encode_tiled(
                pixel_samples, tile_x, tile_y, overlap, tile_t, overlap_t, **newer
            )
        if tile_x is None or tile_y is None:
            return self.encode(pixel_samples)
        step = self.spacial_compression_encode()
        return self.encode(pixel_samples, tile=(tile_x // step, tile_y // step))

    def memory_used_decode(
        self, shape: torch.Size, dtype: torch.dtype, limit_bytes: int | None = None
    ) -> int:
        """Bytes that decoding a latent of this shape takes, for one of the batch."""
        model = self.first_stage_model
        return model.memory_bytes(
            *(self.spacial_compression_encode() * size for size in shape[-2:]),
            lone=model.video_shape(shape)[2] == 1,
            limit_bytes=limit_bytes or _LIMIT_BYTES,
            device=self.device,  # the weights may still be on the host
        )

    def memory_used_encode(
        self, shape: torch.Size, dtype: torch.dtype, limit_bytes: int | None = None
    ) -> int:
        """Bytes that encoding frames `[B, C, T, H, W]` takes, for one of the batch."""
        return self.first_stage_model.memory_bytes(
            *shape[-2:],
            encode=True,
            lone=len(shape) == 4 or shape[2] <= self.first_stage_model.config.temporal_compression,
            limit_bytes=limit_bytes or _LIMIT_BYTES,
            device=self.device,  # the weights may still be on the host
        )

    def vae_encode_crop_pixels(self, pixels: Tensor) -> Tensor:
        """Crop `[..., H, W, C]` about the centre in space alone; drop or add channels."""
        if pixels.ndim < 5:
            return super().vae_encode_crop_pixels(pixels)
        # A video of its own batch would be cropped in time too.
        pictures = super().vae_encode_crop_pixels(pixels.flatten(0, -4))
        return pictures.unflatten(0, pixels.shape[:-3])

    def get_sd(self) -> dict[str, Tensor]:
        """The weights, in the memory order that files have."""
        weights = super().get_sd()
        return {
            key: value if value.is_contiguous() else value.cpu().contiguous()
            for key, value in weights.items()
        }

    def _limits(
        self, tile: tuple[int, int] | None, *, encode: bool = False, lone: bool = False
    ) -> list[int | None]:
        """Memory for one try of SeedVR2 after the other, in bytes; None: as there is."""
        limit = functools.partial(self.first_stage_model.tile_limit, encode=encode, lone=lone)
        most = None if tile is None else limit(*tile)
        smaller = [limit(size, size) for size in _TILES]
        return [most, most, *(each for each in smaller if most is None or each < most)]

    def _decode(
        self,
        latent: Tensor,
        chunk: int | None,
        dtype: torch.dtype | None,
        limit_bytes: int | None = None,
    ) -> Tensor:
        """Stream `[B, C_latent, t, h, w]` into a new IMAGE."""
        together = self._load(
            self.memory_used_decode(latent.shape, self.vae_dtype, limit_bytes),
            latent if limit_bytes is None else None,
        )
        model = self.first_stage_model
        batch, channels, frames, height, width = model.config.decoded_shape(latent.shape)
        with kept():
            images = torch.empty(
                (batch, frames, height, width, channels),
                device=self.output_device,
                dtype=self.vae_output_dtype(),
            )
        progress = Progress(batch * frames)
        for start in range(0, batch, together):
            part = images[start : start + together]
            stream = model.decode_stream(
                latent[start : start + together],
                chunk or model.chunk,
                dtype,
                images=part,
                limit_bytes=limit_bytes,
            )
            at = 0
            for piece in stream:
                at += piece.shape[1]
                progress.passed(piece.shape[0] * piece.shape[1], part[-1, :at])
        return images

    def _decode_in_tiles(self, latent: Tensor, tile_x: int, tile_y: int, overlap: int) -> Tensor:
        """ComfyUI's feathered tiles: whole in time, so that they have seams in space alone."""
        self._load(self.memory_used_decode((*latent.shape[:3], tile_y, tile_x), self.vae_dtype))
        if self.latent_dim == 2:
            # ComfyUI's own tiles of pictures have three channels.
            pictures = comfy.utils.tiled_scale_multidim(
                latent[:, :, 0],
                lambda tile: self.first_stage_model.decode(tile).to(self.vae_output_dtype()),
                tile=(tile_y, tile_x),
                overlap=overlap,
                upscale_amount=self.upscale_ratio,
                out_channels=self.output_channels,
                output_device=self.output_device,
            )
            return self.process_output(pictures).movedim(1, -1).unsqueeze(1).contiguous()
        frames = self.decode_tiled_3d(
            latent, tile_x=tile_x, tile_y=tile_y, overlap=(1, overlap, overlap)
        )
        return frames.movedim(1, -1).contiguous()

    def _encode(
        self,
        video: Tensor,
        chunk: int | None,
        dtype: torch.dtype | None,
        limit_bytes: int | None = None,
    ) -> Tensor:
        """Stream `[B, C, T, H, W]` in [0, 1] into new latents."""
        together = self._load(
            self.memory_used_encode(video.shape, self.vae_dtype, limit_bytes),
            video if limit_bytes is None else None,
        )
        model = self.first_stage_model
        batch, _, frames, height, width = video.shape
        chunk = chunk or model.chunk or model.encode_chunk(height, width, dtype, limit_bytes)
        count = model.config.latent_frames(frames)
        progress = Progress(batch * count)
        streams = []
        for start in range(0, batch, together):
            part = video[start : start + together]
            whole = self.process_input(part) if count == 1 else self._pieces(part, chunk)
            done = []
            for latent in model.mean_stream(whole, chunk, dtype, limit_bytes):
                done.append(latent.to(self.output_device, self.vae_output_dtype()))
                progress.passed(latent.shape[0] * latent.shape[2])
            streams.append(torch.cat(done, dim=2))
        means = torch.cat(streams)
        return means if self.format_encoded is None else self.format_encoded(means)

    def _pieces(self, video: Tensor, chunk: int) -> Iterator[Tensor]:
        """The frames in [-1, 1]: the first, then as many at a time as a step takes."""
        run = self.first_stage_model.config.temporal_compression * chunk
        if chunk == -1:
            run = video.shape[2]
        yield self.process_input(video[:, :, :1])
        for start in range(1, video.shape[2], run):
            yield self.process_input(video[:, :, start : start + run])

    def _as_video(self, pixels: Tensor, not_video: bool) -> Tensor:
        """Crop an IMAGE and view it as `[B, C, T, H, W]`, still in [0, 1]."""
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
        self.first_stage_model.check_frames(video)
        return self.first_stage_model.whole_groups(video)

    def _first(self, task: str, ways: list[Callable[[], Tensor]]) -> Tensor:
        """Go the first way that fits, and leave no memory behind."""
        try:
            return first_that_fits(self.device, task, ways)
        finally:
            give_back(self.device)

    def _load(self, memory_bytes: int, batch: Tensor | None = None) -> int:
        """Bring the weights to their device; say how many of the batch to work on at once.

        Videos go one by one; pictures together, where a GPU has room for it.
        """
        comfy.model_management.load_models_gpu(
            [self.patcher], memory_required=memory_bytes, force_full_load=self.disable_offload
        )
        if self.first_stage_model.device.type != self.device.type:
            # With --novram ComfyUI leaves weights on the host, for operations that fetch them.
            self.patcher.partially_load(self.device, extra_memory=1e32)
        if batch is None or batch.shape[2] > 1 or self.device.type == "cpu":
            return 1
        return max(1, int(self.patcher.get_free_memory(self.device) / max(1, memory_bytes)))
