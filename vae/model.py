"""The VAE: frames to latents and back, whole or as a stream."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .models.base import Network
from .models.config import VAEConfig
from .models.patchify import fold_pixels
from .planning.device_memory import check_holds
from .planning.job import job_of
from .planning.plan import Plan, empty_limit, make_plan
from .streaming.bands.team import SharedDevices, Team
from .streaming.int8.layers import Int8Choices
from .streaming.memory import retried
from .streaming.options import AUTOMATIC, StreamOptions
from .streaming.output import LatentOutput, Output, Wanted
from .streaming.precision import compute_dtype, decode_dtype, eager
from .streaming.prepared.prepared_vae import PreparedVAE
from .streaming.resume import Pieces, Video
from .streaming.session import VideoJob
from .streaming.settings import Setting
from .streaming.source import Part, Source
from .validation import check_frames, check_latent, check_targets, check_tensor
from .weights import VAEWeights


class VideoVAE(PreparedVAE, SharedDevices, VAEWeights):
    """A causal video VAE of the Wan family or of SeedVR2.

    Created by `load_vae`. Parameters have the names of the original checkpoint. Encoding and
    decoding keep no video in the object, so threads can share it. The chunk changes a result by
    rounding only. Shapes are given for a compression of 8 in space and 4 in time, as of Wan 2.1;
    `config` has those of other VAEs.

    Attributes:
        config: Configuration of the VAE.
        dtype: Dtype of decoding and of the frames. A 16-bit dtype that is slow on a CPU is used for
            the frames only: the computation is in float32.
        encode_dtype: Dtype of encoding and of the latents, as `dtype`.
        limit_bytes: Memory limit of a step without the weights; None: a share of the free memory.
        graphs: On a GPU, capture repeated chunks as a CUDA graph. Off until a gain is measured.
        skips_static: Skip static frames in an encode; not on AMD GPUs, whose library would search
            for the shapes of shorter steps.
        allow_fp16: Let a decode in bfloat16 compute in float16 if that is faster
            on the device. `load_vae` sets it if no dtype is chosen. The first overflow clears it,
            and the decode continues in bfloat16.
        devices, shares: What shares each video; see `SharedDevices`.
        sources: Where the user gets another VAE and another latent, for errors.
    """

    sources = "a VAE", "a latent"

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, encode_dtype)
        self.limit_bytes: int | None = None
        self.skips_static = True
        self.team = Team(self.replicas)
        self._int8 = Int8Choices()

    @eager
    def encode(self, frames: Tensor, chunk: int | None = None) -> Tensor:
        """Encode a video, chunk by chunk.

        Args:
            frames: `[B, C, T, H, W]` in [-1, 1], any float dtype, or uint8 in 0-255, or uint16 in
                0-65535; `H` and `W` are multiples of 8. Only `4 n + 1` frames of `T` are used; the
                rest is dropped with a warning.
            chunk: Latents per step; -1: all. None: chosen from size and memory.

        Returns:
            The posterior mean, `[B, C_latent, 1 + (T - 1) // 4, H / 8, W / 8]`, not normalised (for
            SeedVR2 times 0.9152), in `encode_dtype` on `device`.

        Raises:
            ValueError: The frames have another shape, dtype or channel count, are not finite or
                require a gradient; or the checkpoint has no encoder.
        """
        check_tensor(frames, "frames", self.config.image_channels)
        return self.joined(list(self.encode_stream(frames, StreamOptions(chunk))))

    @eager
    def decode(self, latent: Tensor, chunk: int | None = None) -> Tensor:
        """Decode a latent to frames, chunk by chunk.

        Args:
            latent: `[B, C_latent, t, h, w]`, any float dtype, not normalised.
            chunk: Latents per step; -1: all. None: chosen from size and memory.

        Returns:
            `[B, C, 4 t - 3, 8 h, 8 w]` (twice as high and wide from a 2x decoder) in about [-1, 1],
            not clamped, channels-last, in `dtype` on `device`.

        Raises:
            ValueError: The latent has another channel count, shape or dtype, no frames, is not
                finite or requires a gradient.
        """
        check_tensor(latent, "latent", self.config.latent_channels, self.sources)
        frames = retried(lambda: self.new_frames(latent), self.device, "a decode")
        for _ in self.decode_stream(latent, StreamOptions(chunk, whole=True), out=frames):
            pass
        return frames

    @eager
    def encode_stream(
        self,
        pieces: Tensor | Iterable[Tensor],
        options: StreamOptions = AUTOMATIC,
        *,
        scaled: bool = True,
        to_range: Callable[[Tensor], Tensor] | None = None,
    ) -> Pieces:
        """Encode a video in pieces; latents are yielded as soon as their frames are there.

        It goes on after a failure, as `decode_stream` does.

        Args:
            pieces: `[B, C, t, H, W]` each, any `t >= 1`, as for `encode`; or one tensor. A list or
                a `Rereadable` is read again after a failure. Of another iterable, the frames that
                later latents need (112 for Wan 2.1) are kept on the host in their dtype.
            options: Options of the stream.
            scaled: Multiply by `config.latent_scale`, as `encode` does; otherwise return the
                posterior mean.
            to_range: Converts float pieces to [-1, 1], on the device; None: they are in that range.

        Returns:
            An iterator of latents `[B, C_latent, n, H / 8, W / 8]`: the first one, then `chunk` at
            a time.

        Raises:
            ValueError: As for `encode`; for a piece when it is reached. On a GPU, values that are
                not finite are found at the end, because each look at them would stop the device.
        """
        latents, scale = self.config.latent_channels, self.config.latent_scale if scaled else 1
        dtype = options.dtype or self.encode_dtype
        encoder = self.encoding()
        computed = compute_dtype(dtype, self.device)
        source = Source(pieces, self.check_frames)
        part = Part(encoder, self.config, source.tensor, None)

        def folded(x: Tensor) -> Tensor:
            return fold_pixels(x, self.config.patch_size)

        def mean_of(x: Tensor) -> Tensor:
            mean = x[:, :latents] if self.conv1 is None else self.conv1(x, outputs=slice(latents))
            return (mean if scale == 1 else mean * scale).to(dtype)

        def sink(wanted: Wanted, **_: object) -> LatentOutput:
            return LatentOutput(mean_of, wanted)

        job = self._video_job(encoder, options, source, folded, to_range)
        setting = Setting(self.device, computed, computed)
        return Video(self, job, source, part, setting, sink).pieces()

    @eager
    def decode_stream(
        self,
        latent: Tensor | Iterable[Tensor],
        options: StreamOptions = AUTOMATIC,
        *,
        out: Tensor | None = None,
        images: Tensor | None = None,
        frames: range | None = None,
        deep: bool = False,
    ) -> Pieces:
        """Decode a latent and yield the frames as soon as they are done.

        Memory does not depend on the length of the video. A latent of an iterable is requested when
        the frames before it were taken.

        If memory runs out, values overflow in a narrow dtype or a device fails, the decode goes on
        with the next frame: under a smaller plan, in a wider dtype, on the VAE's own device, at
        last on the CPU, where new tensors are then. That costs at most one more decode: it computes
        the latents again that the next frame depends on (38 for Wan 2.1).

        Args:
            latent: `[B, C_latent, t, h, w]`, or an iterable of these in order of time. A list or a
                `Rereadable` is read again after a failure. Of another iterable, the latents that
                later frames need are kept on the host.
            options: Options of the stream.
            out: `[B, C, T, H, W]` for the whole video, any dtype, strides and device: each piece is
                written there and is a view of it; on the host in the background, while the device
                computes the next piece of a tensor. None: new tensors.
            images: As `out`, `[B, T, H, W, C]`, float, uint8 or uint16: the pieces are images,
                clamped to [0, 1] or in 0-255 or 0-65535 (see `frames_to_images`).
            frames: The frames to decode, such as `range(40, 81)`; `out` or `images` have room for
                these only, and the rest is not computed. None: all.
            deep: The frames are for a file of more than 8 bits: new tensors are float32, and GPUs
                compute in float16: bfloat16 has steps of 1 / 256 near 1.

        Returns:
            An iterator of frames `[B, C, n, H, W]`, as from `decode`, or of images `[B, n, H, W,
            C]`; `n` varies.

        Raises:
            ValueError: As for `decode`, or both `out` and `images` are given, or `frames` are not
                in the video; for a piece of an iterable when it is reached.
            ExhaustedError: Memory stays short; the message is one line.
        """
        asked = options.dtype or self.dtype
        source = Source(latent, self.check_latent)
        part = Part(self.decoder, self.config, source.tensor, frames)
        check_targets(source.tensor, self.config, out, images, frames)
        setting = self._decode_setting(options, asked, deep=deep)
        job = self._video_job(self.decoder, options, source, self._mixed)
        result = torch.float32 if deep else asked
        sink = functools.partial(Output, self.config, result, out, images)
        target, axis = (out, 2) if images is None else (images, 1)
        return Video(self, job, source, part, setting, sink, target, axis).pieces()

    def joined(self, latents: Sequence[Tensor]) -> Tensor:
        """Join the `latents` `[B, C_latent, n, h, w]` of an encode in time, on `device`."""
        # Those of the last setting are on the CPU.
        join = lambda: torch.cat([latent.to(self.device) for latent in latents], dim=2)  # noqa: E731
        return retried(join, self.device, "an encode")

    def normalize(self, latent: Tensor) -> Tensor:
        """Return `(latent - mean) / std` of each channel of `latent` `[B, C_latent, t, h, w]`."""
        mean, std = self._statistics(latent)
        return (latent - mean) / std

    def denormalize(self, latent: Tensor) -> Tensor:
        """Return `latent * std + mean` of each channel of `latent` `[B, C_latent, t, h, w]`."""
        mean, std = self._statistics(latent)
        return latent * std + mean

    def new_frames(self, latent: Tensor) -> Tensor:
        """Return memory `[B, C, T, H, W]` for the frames of `latent`, in `dtype` on `device`."""
        shape, order = self.config.decoded_shape(latent.shape), torch.channels_last_3d
        check_holds(shape, self.dtype, self.device)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=order)

    def check_latent(self, latent: Tensor, at: int | None = None) -> None:
        """Raise the `ValueError` of `decode` if `latent`, or the piece of one at `at`, is bad."""
        check = functools.partial(check_latent, latent, self.config, self.sources, at)
        retried(check, self.device, "a decode")

    def check_frames(
        self, frames: Tensor, device: torch.device | None = None, at: int | None = None
    ) -> None:
        """Raise the `ValueError` of an encode on `device` if `frames`, or a piece, are bad."""
        # On other devices than a CPU the stream checks the values.
        values = (device or self.device).type == "cpu"
        check = functools.partial(check_frames, frames, self.config, at, values=values)
        retried(check, self.device, "an encode")

    def plan(
        self,
        height: int,
        width: int,
        options: StreamOptions = AUTOMATIC,
        *,
        encode: bool = False,
        single_frame: bool = False,
        device: torch.device | None = None,
        cuts: bool = True,
        empty: bool = False,
    ) -> Plan:
        """Return the plan of a stream of any length, with its memory.

        Args:
            height: Height of the frames (of a 2x decoder: half of it).
            width: Width of the frames (of a 2x decoder: half of it).
            options: Options of the stream.
            encode: Plan an encode; otherwise a decode.
            single_frame: The video has one frame.
            device: Device of the computation; None: that of the weights.
            cuts: Allow tiles where whole frames do not fit.
            empty: Plan for a device that nothing else uses, unless a limit is given.

        Returns:
            The plan for a batch of one.

        Raises:
            ValueError: `encode` is set and the checkpoint has no encoder.
        """
        network = self.encoding() if encode else self.decoder
        step = self.config.spatial_compression
        size = height // step, width // step
        device = device or self.device
        asked = options.dtype or (self.encode_dtype if encode else self.dtype)
        allowed = self.allow_fp16 and options.dtype is None and not encode
        dtype = decode_dtype(asked, device, allow_fp16=allowed)
        coded = frozenset[str]() if encode else self.planned_codes(dtype, device)
        model = network, self.config, (1, *size), dtype, device
        job = job_of(*model, single_frame=single_frame, coded=coded)
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        limit = empty_limit(job) if limit is None and empty else limit
        banded = self.team.plan(job, replace(options, limit_bytes=limit)) if cuts else None
        if banded is not None:
            return banded
        return make_plan(job, limit, chunk=options.chunk, tile=options.tile, cuts=cuts)

    def _decode_setting(self, options: StreamOptions, asked: torch.dtype, *, deep: bool) -> Setting:
        """Return the setting of the first run of a decode."""
        device, allowed = self.device, self.allow_fp16 and options.dtype is None
        decides = functools.partial(decode_dtype, asked, device, allow_fp16=allowed)
        dtype = decides(deep=True)
        coded = self.ready_codes(dtype)
        dtype = dtype if coded or deep else decides()
        narrow = bool(coded) or dtype == torch.float16 != asked
        wide = compute_dtype(asked, device) if narrow else dtype
        return Setting(device, dtype, wide, coded)

    def _video_job(
        self,
        network: Network,
        options: StreamOptions,
        source: Source,
        enter: Callable[[Tensor], Tensor],
        to_range: Callable[[Tensor], Tensor] | None = None,
    ) -> VideoJob:
        """Return what a video needs under every setting."""
        video, encodes = source.tensor, network is self.encoder
        chunk = options.chunk or (None if video is not None else 1)  # pieces in, pieces out
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        return VideoJob(
            network,
            self.config,
            replace(options, chunk=chunk, limit_bytes=limit),
            encodes,
            video,
            enter,
            functools.partial(self.kernels_of, encodes=encodes),
            self.proved,
            self.team,
            to_range,
            graphs=self.graphs,
            skips=encodes and self.skips_static,
        )

    def _mixed(self, x: Tensor) -> Tensor:
        """Return a latent `[B, C_latent, t, h, w]` as the decoder takes it."""
        return x / self.config.latent_scale if self.conv2 is None else self.conv2(x)

    def _statistics(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(latent, "latent", self.config.latent_channels)
        numbers = self.config.latent_mean, self.config.latent_std
        mean, std = (latent.new_tensor(each).view(1, -1, 1, 1, 1) for each in numbers)
        return mean, std
