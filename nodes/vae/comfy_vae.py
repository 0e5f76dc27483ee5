"""Our VAE behind ComfyUI's VAE protocol: a `comfy.sd.VAE` that any node can use.

It decodes and encodes piece by piece, from the latent into the IMAGE and back, instead of holding a
video twice on the device; `swap.py` makes it. What is said of ComfyUI here was read off comfy/sd.py
and comfy/model_management.py of 0.33.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from ...vae import Relief, StreamOptions
from ..host import timing
from ..host.oom import Way, free_others, give_back, in_turn, kept, make_room
from ..host.progress import Progress
from .first_stage import FastVideoVAE

# Memory that is asked of ComfyUI for the longest steps; with less they are shorter, not slower by
# much. More would push the diffusion model out for nothing.
_LIMIT_BYTES = 4 << 30

# Where nothing else fits: tiles of so many latents a side, one size after the other. Of SeedVR2,
# which cannot be cut, no more than the memory that they would take.
_TILES = (64, 32, 16)

Size = tuple[int, int]

_AGAIN = "with all models unloaded"
_ON_HOST = "on the CPU"


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
        tile: Size | None = None,
        **newer: object,
    ) -> Tensor:
        """Decode latents into an IMAGE.

        Args:
            samples_in: `[B, C_latent, t, h, w]`, or `[B, C_latent, h, w]` for pictures (of SeedVR2
                `[B, C_latent * t, h, w]` for videos), not normalised.
            vae_options: Options of other VAEs, which mean nothing here.
            chunk: Latents per step; -1: all; None: as chosen for the VAE.
            dtype: Of this decode; None: that of the VAE.
            tile: Height and width, in latents, of the exact tiles that the last layers run in;
                None: tiles only where whole frames do not fit. Of SeedVR2, which is never cut, the
                size whose memory is the limit.
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
        model.check_latent(latent)
        try:
            with timing.span("VAE decode", device=self.device):
                images = self._decode(latent, chunk, dtype, tile)
        finally:
            give_back(self.device)
        return images.squeeze(1) if samples_in.ndim == 4 and not model.is_seedvr2 else images

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
        """Decode latents into an IMAGE, in exact tiles: the result is that of `decode`.

        Nothing is cut in time, because the stream is exact and its memory bounded.

        Args:
            samples: As for `decode`.
            tile_x: Width of a tile in latents; of SeedVR2, which is never cut, a step may take the
                memory of such a tile.
            tile_y: Height of one.
            overlap: Unused: a tile has the halo that it needs.
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
        return self.decode(samples, tile=(tile_y, tile_x))

    def encode(
        self,
        pixel_samples: Tensor,
        not_video: bool | None = None,
        *,
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        tile: Size | None = None,
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
            tile: As for `decode`, of the first layers.
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
        not_video = self.not_video if not_video is None else not_video
        relief = Relief(self.device, "an encode", self.free_others)
        video = relief.finish(lambda: self._as_video(pixel_samples, not_video))
        shape = video.shape[2] == 1
        ways = self.ways(tile, encode=True, lone=shape)
        try:
            with timing.span("VAE encode", device=self.device):
                latents = in_turn(
                    self.device,
                    "an encode",
                    ways,
                    lambda way: self._encode(video, chunk, dtype, way),
                )
        finally:
            give_back(self.device)
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
        """Encode an IMAGE, in exact tiles: the result is that of `encode`.

        Args:
            pixel_samples: As for `encode`.
            tile_x: Width of a tile in pixels; of SeedVR2, which is never cut, a step may take the
                memory of such a tile.
            tile_y: Height of one.
            overlap: Unused: a tile has the halo that it needs.
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
        return self.encode(pixel_samples, tile=(tile_y // step, tile_x // step))

    def memory_used_decode(
        self, shape: torch.Size, dtype: torch.dtype, way: Way | None = None
    ) -> int:
        """Bytes that decoding a latent of this shape takes, for one of the batch."""
        model = self.first_stage_model
        size = (self.spacial_compression_encode() * length for length in shape[-2:])
        return self._memory_used(*size, way, encode=False, lone=model.video_shape(shape)[2] == 1)

    def memory_used_encode(
        self, shape: torch.Size, dtype: torch.dtype, way: Way | None = None
    ) -> int:
        """Bytes that encoding frames `[B, C, T, H, W]` takes, for one of the batch."""
        lone = len(shape) == 4 or shape[2] <= self.first_stage_model.config.temporal_compression
        return self._memory_used(*shape[-2:], way, encode=True, lone=lone)

    def _memory_used(
        self, height: int, width: int, way: Way | None, *, encode: bool, lone: bool
    ) -> int:
        way = way or Way("")
        # Who asks for tiles is short of memory: room for the smallest steps on one of them. What is
        # free beyond that the stream finds by itself.
        limit = way.limit_bytes or (_LIMIT_BYTES if way.tile is None else 1)
        plan = self.first_stage_model.plan(
            height,
            width,
            StreamOptions(limit_bytes=limit, tile=way.tile),
            encode=encode,
            lone=lone,
            device=self.device,  # the weights may still be on the host
            cuts=False,
        )
        return plan.peak_bytes

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

    def ways(self, tile: Size | None, *, encode: bool = False, lone: bool = False) -> list[Way]:
        """What is tried one after the other while memory runs out.

        Args:
            tile: Height and width in latents that were asked for.
            encode: For encoding; else for decoding.
            lone: For a video of one frame.
        """
        model = self.first_stage_model
        if model.is_seedvr2:
            limit = functools.partial(model.tile_limit, encode=encode, lone=lone)
            most = None if tile is None else limit(*reversed(tile))
            less = [limit(size, size) for size in _TILES]
            found = [Way("", None, most), Way(_AGAIN, None, most)]
            found += [
                Way(f"in steps of {each / 2**20:.0f} MiB", None, each)
                for each in less
                if most is None or (each or 0) < most
            ]
        else:
            own = None if tile is None else self._pixels(tile)
            found = [Way("", own), Way(_AGAIN, own)]
            found += [
                Way(f"in tiles of {pixels[0]} pixels", pixels)
                for pixels in (self._pixels((size, size)) for size in _TILES)
                if own is None or pixels[0] * pixels[1] < own[0] * own[1]
            ]
        if self.device.type != "cpu":
            found.append(Way(_ON_HOST, on_host=True))
        return found

    def _pixels(self, tile: Size) -> Size:
        config = self.first_stage_model.config
        step = config.spatial_compression * config.output_scale
        return tile[0] * step, tile[1] * step

    def decode_pieces(
        self,
        latent: Tensor,
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        frames: range | None = None,
        images: Tensor | None = None,
        tile: Size | None = None,
        out: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Decode on the device and give the frames away as they are done.

        When memory runs out it goes on from the frame where it stopped: in the stream itself by a
        smaller plan; should that not help, with all models unloaded, in smaller tiles, and at last
        on the CPU.

        Args:
            latent: `[B, C_latent, t, h, w]`, not normalised, checked.
            chunk: Latents per step; -1: all; None: as chosen for the VAE.
            dtype: Of this decode; None: that of the VAE.
            frames: Those that are wanted; None: all.
            images: `[B, T, H, W, C]` for them; None: the pieces are frames of their own.
            tile: Height and width of tiles in latents; None: only where whole frames do not fit.
            out: `[B, C, T, H, W]` for them, instead of images.

        Yields:
            Frames `[B, C, n, H, W]` in about [-1, 1], or images `[B, n, H, W, C]`.
        """
        model = self.first_stage_model
        count = model.config.frames(latent.shape[2])
        wanted = range(count) if frames is None else frames
        at = wanted.start
        ways = self.ways(tile, lone=latent.shape[2] == 1)
        first: Exception | None = None
        with comfy.model_management.cuda_device_context(self.device):
            for way in ways:
                if first is not None:
                    make_room(f"a decode at frame {at}", way, warns=way is ways[1])
                rest = range(at, wanted.stop)
                if not rest:
                    return
                try:
                    self.load(self.memory_used_decode(latent.shape, self.vae_dtype, way), way=way)
                    options = StreamOptions(
                        chunk or model.chunk, dtype, way.limit_bytes, way.tile, self.free_others
                    )
                    for piece in model.decode_stream(
                        latent,
                        options,
                        out=None if out is None else out[:, :, at - wanted.start :],
                        images=None if images is None else images[:, at - wanted.start :],
                        frames=None if len(rest) == count else rest,
                    ):
                        at += piece.shape[2 if images is None else 1]
                        yield piece
                    return
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    # Without the frames that it went through, which hold tensors.
                    first = first or error.with_traceback(None)
        if first is not None:
            raise Relief(self.device, "a decode").exhausted(first) from None

    def free_others(self) -> None:
        """Unload other models from the device of this VAE."""
        free_others(self.patcher, self.device)

    def _decode(
        self, latent: Tensor, chunk: int | None, dtype: torch.dtype | None, tile: Size | None
    ) -> Tensor:
        """Stream `[B, C_latent, t, h, w]` into a new IMAGE."""
        (way, *_) = self.ways(tile, lone=latent.shape[2] == 1)
        needed = self.memory_used_decode(latent.shape, self.vae_dtype, way)
        together = self.together(needed, latent if way.limit_bytes is None else None)
        model = self.first_stage_model
        batch, channels, frames, height, width = model.config.decoded_shape(latent.shape)
        with kept():
            empty = functools.partial(
                torch.empty,
                (batch, frames, height, width, channels),
                device=self.output_device,
                dtype=self.vae_output_dtype(),
            )
            images = Relief(self.device, "a decode", self.free_others).finish(empty)
        progress = Progress(batch * frames)
        for start in range(0, batch, together):
            part = images[start : start + together]
            at = 0
            for piece in self.decode_pieces(
                latent[start : start + together], chunk, dtype, images=part, tile=tile
            ):
                at += piece.shape[1]
                progress.passed(piece.shape[0] * piece.shape[1], part[-1, :at])
        return images

    def _encode(
        self, video: Tensor, chunk: int | None, dtype: torch.dtype | None, way: Way
    ) -> Tensor:
        """Stream `[B, C, T, H, W]` in [0, 1] into new latents."""
        needed = self.memory_used_encode(video.shape, self.vae_dtype, way)
        self.load(needed, way=way)
        together = self.together(needed, video if way.limit_bytes is None else None)
        model = self.first_stage_model
        batch, _, frames, height, width = video.shape
        options = StreamOptions(None, dtype, way.limit_bytes, release=self.free_others)
        chunk = chunk or model.chunk or model.plan(height, width, options, encode=True).chunk
        options = replace(options, chunk=chunk, tile=way.tile)
        count = model.config.latent_frames(frames)
        progress = Progress(batch * count)
        streams = []
        for start in range(0, batch, together):
            part = video[start : start + together]
            whole = self.process_input(part) if count == 1 else self._pieces(part, chunk)
            done = []
            for latent in model.encode_stream(whole, options, scaled=False):
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

    def load(self, memory_bytes: int, *, way: Way | None = None) -> None:
        """Bring the weights to the device of the work, and make room there.

        Args:
            memory_bytes: Room beside the weights.
            way: How the work is tried; None: on the device of the VAE.
        """
        if way is not None and way.on_host:
            comfy.model_management.unload_model_and_clones(self.patcher)
            return
        with timing.span("load", "VAE to its device", self.device):
            comfy.model_management.load_models_gpu(
                [self.patcher], memory_required=memory_bytes, force_full_load=self.disable_offload
            )
            if self.first_stage_model.device.type != self.device.type:
                # With --novram ComfyUI leaves weights on the host, for operations that fetch them.
                self.patcher.partially_load(self.device, extra_memory=1e32)

    def together(self, memory_bytes: int, batch: Tensor | None) -> int:
        """How many of a batch to work on at once.

        Videos go one by one; pictures together, where a GPU has room for it.
        """
        if batch is None or batch.shape[2] > 1 or self.device.type == "cpu":
            return 1
        return max(1, int(self.patcher.get_free_memory(self.device) / max(1, memory_bytes)))
