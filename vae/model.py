"""The VAE: frames to latents and back, whole or as a stream."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .layers.inputs.coding import Coding
from .layers.oom import Relief
from .layers.workspace import uint16_as_int16
from .models.base import Network
from .models.config import VAEConfig
from .models.patchify import fold_pixels
from .planning.device_memory import check_holds
from .planning.job import job_of
from .planning.parts import divide, largest_part
from .planning.plan import Plan, empty_limit, make_plan
from .sharding.shared_ranks import SharedRanks
from .streaming.bands.crew import Team
from .streaming.bands.shared_devices import SharedDevices
from .streaming.int8.layers import Int8Choices
from .streaming.options import AUTOMATIC, StreamOptions
from .streaming.output import Output, background_writer, delivered, until_complete
from .streaming.overflow import Watch, allows_fp16, continued
from .streaming.part import Part
from .streaming.precision import compute_dtype, decode_dtype, eager
from .streaming.prepared.prepared_vae import PreparedVAE
from .streaming.session import VideoSession
from .validation import check_frames, check_latent, check_targets, check_tensor, checked
from .weights import VAEWeights


class VideoVAE(PreparedVAE, SharedDevices, SharedRanks, VAEWeights):
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
        devices, shards: What shares each video; see `SharedDevices` and `SharedRanks`.
        sources: Where the user gets another VAE and another latent, for errors.
    """

    sources = "a VAE", "a latent"

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, encode_dtype)
        self.limit_bytes: int | None = None
        self.graphs = False
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
        with self.preparing():
            check_tensor(frames, "frames", self.config.image_channels)
        latents = list(self.encode_stream(frames, StreamOptions(chunk)))
        relief = Relief(self.device, "an encode")
        with self.preparing():
            return self.on_all(lambda: torch.cat(latents, dim=2), relief)

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
        with self.preparing():
            check_tensor(latent, "latent", self.config.latent_channels, self.sources)
            frames = self.on_all(lambda: self.new_frames(latent), Relief(self.device, "a decode"))
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
    ) -> Iterator[Tensor]:
        """Encode a video in pieces; latents are yielded as soon as their frames are there.

        Args:
            pieces: `[B, C, t, H, W]` each, any `t >= 1`, as for `encode`; or one tensor.
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
        relief = Relief(self.device, "an encode", options.release)
        dtype = options.dtype or self.encode_dtype
        with self.preparing():
            encoder = self.encoding()
            computed = self.agreed(compute_dtype(dtype, self.device))
            source = map(uint16_as_int16, checked(pieces, self.check_frames))
        known = isinstance(pieces, Tensor)

        def mean_of(x: Tensor) -> Tensor:
            mean = x[:, :latents] if self.conv1 is None else self.conv1(x, outputs=slice(latents))
            return (mean if scale == 1 else mean * scale).to(dtype)

        return self._stream(
            encoder,
            options,
            computed,
            source,
            enter=lambda x: fold_pixels(x, self.config.patch_size),
            to_range=to_range,
            leave=lambda x: relief.attempt(lambda: mean_of(x)),
            relief=relief,
            known=known,
            single_frame=known and self.config.latent_frames(pieces.shape[2]) == 1,
        )

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
    ) -> Iterator[Tensor]:
        """Decode a latent and yield the frames as soon as they are done.

        Memory does not depend on the length of the video. A latent of an iterable is requested when
        the frames before it were taken.

        Args:
            latent: `[B, C_latent, t, h, w]`, or an iterable of these in order of time.
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
        """
        device, asked = self.device, options.dtype or self.dtype
        with self.preparing():
            allowed = allows_fp16(self, options)
            decides = functools.partial(decode_dtype, asked, device, allow_fp16=allowed)
            dtype = decides(deep=True)
            coding = self.ready_coding(dtype)
            dtype = self.agreed(dtype if coding or deep else decides())
            watches = coding is not None or dtype == torch.float16 != asked
            # A CPU finds an overflow as soon as it computes it.
            at_end = options.whole and device.type != "cpu"
            watch = Watch(coding, at_end=at_end) if watches else None
            source = latent, frames, self.decoder, self.config, self.check_latent
            part = Part(*source, keeps=bool(watch))
            check_targets(latent, self.config, out, images, frames)
            wider = dtype if watch is None else self.agreed(compute_dtype(asked, device))
        result = torch.float32 if deep else asked
        run = functools.partial(self._frames_of, options, result, out, images)
        if watch is None:
            return run(part, dtype)
        narrow = functools.partial(run, part, dtype, watch)
        wide = functools.partial(run, dtype=wider)
        return continued(self, options, part, watch, narrow, wide, as_images=images is not None)

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
        Relief(self.device, "a decode").finish(check)

    def check_frames(
        self, frames: Tensor, device: torch.device | None = None, at: int | None = None
    ) -> None:
        """Raise the `ValueError` of an encode on `device` if `frames`, or a piece, are bad."""
        # On other devices than a CPU the stream checks the values.
        values = (device or self.device).type == "cpu"
        check = functools.partial(check_frames, frames, self.config, at, values=values)
        Relief(self.device, "an encode").finish(check)

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
        ranks: int = 1,
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
            ranks: Ranks that share the frames, see `shard`; the plan is that of the largest part.

        Returns:
            The plan for a batch of one.

        Raises:
            ValueError: `encode` is set and the checkpoint has no encoder, or there are more ranks
                than rows or columns of a latent.
        """
        network = self.encoding() if encode else self.decoder
        step = self.config.spatial_compression
        size = height // step, width // step
        if ranks > 1:
            size = largest_part(size, *divide(size, ranks))
        device = device or self.device
        asked = options.dtype or (self.encode_dtype if encode else self.dtype)
        dtype = decode_dtype(asked, device, allow_fp16=not encode and allows_fp16(self, options))
        coded = frozenset[str]() if encode else self.planned_codes(dtype, device)
        model = network, self.config, (1, *size), dtype, device
        job = job_of(*model, single_frame=single_frame, ranks=ranks, coded=coded)
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        limit = empty_limit(job) if limit is None and empty else limit
        banded = None
        if cuts and ranks == 1:
            banded = self.team.plan(job, replace(options, limit_bytes=limit))
        if banded is not None:
            return banded[0]
        return make_plan(job, limit, chunk=options.chunk, tile=options.tile, cuts=cuts)

    def _frames_of(
        self,
        options: StreamOptions,
        result: torch.dtype,
        out: Tensor | None,
        images: Tensor | None,
        part: Part,
        dtype: torch.dtype,
        watch: Watch | None = None,
    ) -> Generator[Tensor, None, None]:
        """Decode a part of a video as `decode_stream` to frames in `result`."""
        config, device = self.config, self.device
        relief = Relief(device, "a decode", options.release)
        writer = background_writer(device, out if images is None else images)
        stream = self._stream(
            self.decoder,
            options,
            dtype,
            part.source,
            enter=self.conv2 or (lambda x: x / config.latent_scale),
            leave=Output(config, result, out, images, part, relief.attempt, writer, watch),
            relief=relief,
            known=part.known,
            single_frame=part.single_frame,
            begins=part.begins,
            coding=None if watch is None else watch.coding,
        )
        stream = until_complete(stream, part.frames, as_images=images is not None)
        reads = watch is not None and not watch.at_end and device.type != "cpu"
        waits = writer is not None or reads
        return delivered(stream, writer, ahead=part.known) if waits else stream

    def _stream(
        self,
        network: Network,
        options: StreamOptions,
        dtype: torch.dtype,
        source: Iterator[Tensor],
        *,
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor], Tensor] | Output,
        relief: Relief,
        known: bool,
        single_frame: bool,
        begins: bool = True,
        coding: Coding | None = None,
        to_range: Callable[[Tensor], Tensor] | None = None,
    ) -> Generator[Tensor, None, None]:
        """Run the checked pieces of one video, which is `known` as a whole, through the layers."""
        chunk = options.chunk or (None if known else 1)  # pieces in, pieces out
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        session = VideoSession(
            network,
            self.config,
            replace(options, chunk=chunk, limit_bytes=limit),
            dtype,
            enter,
            to_range,
            leave,
            relief,
            single_frame=single_frame,
            begins=begins,
            graphs=self.graphs,
            skips=network is self.encoder and self.skips_static,
            kernels=functools.partial(self.kernels_of, network, dtype, coding),
            shards=self.shards,
            team=self.team.of_video() if self.shards is None else None,
            known=known,
            coding=coding,
        )
        stream = session.run(source)
        return stream if self.shards is None else self.shards.in_step(stream)

    def _statistics(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(latent, "latent", self.config.latent_channels)
        numbers = self.config.latent_mean, self.config.latent_std
        mean, std = (latent.new_tensor(each).view(1, -1, 1, 1, 1) for each in numbers)
        return mean, std
