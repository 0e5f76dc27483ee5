"""The VAE: frames to latents and back, whole or as a stream."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from .layers.conv import Conv, PointwiseConv
from .layers.oom import Relief
from .models.base import Network
from .models.build import make_decoder, make_encoder
from .models.config import SEEDVR2, VAEConfig
from .models.patchify import fold_pixels
from .models.receptive_field import latents_before
from .planning.plan import Plan, job_of, make_plan
from .streaming.options import AUTOMATIC, StreamOptions
from .streaming.output import Output, until_complete
from .streaming.precision import compute_dtype
from .streaming.session import VideoSession, eager
from .validation import (
    check_frames,
    check_latent,
    check_range,
    check_targets,
    check_tensor,
    checked,
)


class VideoVAE(nn.Module):
    """A causal video VAE of the Wan family, or that of SeedVR2.

    Made by `load_vae`. The parameters have the names of the original checkpoint. Decoding and
    encoding keep no state in the object, so threads may share it. Every result is exact for any
    chunk: it differs from the frame by frame one by rounding alone.

    Attributes:
        config: What the weights are.
        dtype: The dtype that it decodes in, and of the frames that come out. A 16-bit dtype that is
            slow on a CPU is that of the frames alone: the computation is in float32.
        encode_dtype: The dtype that it encodes in, and of the latents that come out, as `dtype` is.
        limit_bytes: Memory that a step may take beside the weights; None: a part of what is free.
        graphs: On a GPU, record the steps of chunks that repeat as a CUDA graph and replay it: less
            work for the CPU, for memory of the graph's own. Off until a gain is measured.
        skips_still: Encode frames that do not change until they make no difference any more, and
            repeat what they gave.
        allow_tf32: In float32, leave PyTorch's own switches as they are, so that TF32 (or bf16
            products on a CPU) is used where they allow it. By default float32 means float32.
    """

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.encode_dtype = encode_dtype
        self.limit_bytes: int | None = None
        self.allow_tf32 = False
        self.graphs = False
        self.skips_static = True
        latents = config.latent_channels
        mixes = config.family != SEEDVR2
        self.encoder = make_encoder(config)
        self.conv1 = PointwiseConv(2 * latents, 2 * latents) if mixes and self.encoder else None
        self.conv2 = PointwiseConv(latents, latents) if mixes else None
        self.decoder = make_decoder(config)
        self.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are; inputs are moved there, and results stay there."""
        return next(self.decoder.parameters()).device

    @eager
    def encode(self, frames: Tensor, chunk: int | None = None) -> Tensor:
        """Encode a video, chunk by chunk.

        Args:
            frames: `[B, C, T, H, W]` in [-1, 1], of any float dtype, or uint8 in 0-255; `H` and `W`
                are multiples of 8. Of `T` only `4 n + 1` frames are used; a shorter tail is dropped
                with a warning.
            chunk: Latents per step; -1: all. None: chosen from size and memory.

        Returns:
            The mean of the posterior, `[B, C_latent, 1 + (T - 1) // 4, H / 8, W / 8]`, not
            normalised (of SeedVR2 times 0.9152), in `encode_dtype` on `device`.

        Raises:
            ValueError: The frames have another shape, dtype or channel count, or are not finite; or
                the checkpoint has no encoder.
        """
        check_tensor(frames, "frames", self.config.image_channels)
        latents = list(self.encode_stream(frames, StreamOptions(chunk)))
        return Relief(self.device, "an encode").finish(lambda: torch.cat(latents, dim=2))

    @eager
    def decode(self, latent: Tensor, chunk: int | None = None) -> Tensor:
        """Decode a latent to frames, chunk by chunk.

        Args:
            latent: `[B, C_latent, t, h, w]`, of any float dtype, not normalised.
            chunk: Latents per step; -1: all. None: chosen from size and memory.

        Returns:
            `[B, C, 4 t - 3, 8 h, 8 w]` (twice as high and wide from a 2x decoder) in about [-1, 1],
            not clamped, channels-last, in `dtype` on `device`.

        Raises:
            ValueError: The latent has another channel count, dimensions or dtype, no frames, or is
                not finite.
        """
        check_tensor(latent, "latent", self.config.latent_channels)
        frames = Relief(self.device, "a decode").finish(lambda: self.new_frames(latent))
        for _ in self.decode_stream(latent, StreamOptions(chunk), out=frames):
            pass
        return frames

    @eager
    def encode_stream(
        self,
        pieces: Tensor | Iterable[Tensor],
        options: StreamOptions = AUTOMATIC,
        *,
        scaled: bool = True,
    ) -> Iterator[Tensor]:
        """Encode a video that comes in pieces; latents leave as soon as their frames are there.

        Args:
            pieces: `[B, C, t, H, W]` each, any `t >= 1`, as for `encode`; or one tensor.
            options: How it runs.
            scaled: Times `config.latent_scale`, as `encode` returns it; else the bare mean of the
                posterior.

        Returns:
            An iterator of latents `[B, C_latent, n, H / 8, W / 8]`: the first alone, then `chunk`
            at a time.

        Raises:
            ValueError: As for `encode`; for a piece when it is reached.
        """
        encoder = self._encoding()
        latents, patch = self.config.latent_channels, self.config.patch_size
        scale = self.config.latent_scale if scaled else 1
        relief = Relief(self.device, "an encode", options.release)
        dtype = options.dtype or self.encode_dtype

        def mean_of(x: Tensor) -> Tensor:
            mean = x[:, :latents] if self.conv1 is None else self.conv1(x, out_channels=latents)
            return (mean if scale == 1 else mean * scale).to(dtype)

        return self._stream(
            encoder,
            options,
            pieces,
            checked(pieces, self.check_frames),
            enter=lambda x: fold_pixels(x, patch),
            leave=lambda x: relief.attempt(lambda: mean_of(x)),
            relief=relief,
            single_frame=isinstance(pieces, Tensor)
            and self.config.latent_frames(pieces.shape[2]) == 1,
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
    ) -> Iterator[Tensor]:
        """Decode a latent and give the frames away as they are done.

        The memory that it takes does not depend on the length of the video. Of an iterable no
        latent is asked for before the frames of those before it have left.

        Args:
            latent: `[B, C_latent, t, h, w]`, or an iterable of such, one after the other in time.
            options: How it runs.
            out: `[B, C, T, H, W]` of the whole video, of any dtype, strides and device: each piece
                is written there, and the piece that comes is the part of it. None: new tensors.
            images: As `out`, `[B, T, H, W, C]` of a float dtype or uint8: instead of frames each
                piece is images, clamped to [0, 1] or in 8 bits (see `frames_to_images`).
            frames: Only these come, such as `range(40, 81)`, and `out` or `images` are of them
                alone; what does not matter to them is not computed. None: all.

        Returns:
            An iterator of frames `[B, C, n, H, W]`, as from `decode`, or of images `[B, n, H, W,
            C]`; `n` varies.

        Raises:
            ValueError: As for `decode`, or there are both `out` and `images`, or `frames` are not
                of the video; for a piece of an iterable when it is reached.
        """
        config = self.config
        relief = Relief(self.device, "a decode", options.release)
        start, source = 0, checked(latent, self.check_latent)
        whole = isinstance(latent, Tensor)
        if frames is not None:
            check_range(frames, config.frames(latent.shape[2]) if whole else None)
            if whole:
                start, stop = self._latents_of(frames)
                source = iter([latent[:, :, start:stop]])
        check_targets(latent, config, out, images, frames)
        dtype = options.dtype or self.dtype
        first_frame = start and config.frames(start)
        stream = self._stream(
            self.decoder,
            options,
            latent,
            source,
            enter=self.conv2 or (lambda x: x / config.latent_scale),
            leave=Output(config, dtype, out, images, frames, first_frame, relief.attempt),
            relief=relief,
            single_frame=whole and latent.shape[2] == 1,
            begins=not start,
        )
        if frames is None:
            return stream
        return until_complete(stream, frames, as_images=images is not None)

    def normalize(self, latent: Tensor) -> Tensor:
        """Shift and scale each channel by the statistics of the family: `(latent - mean) / std`."""
        mean, std = self._statistics(latent)
        return (latent - mean) / std

    def denormalize(self, latent: Tensor) -> Tensor:
        """Undo `normalize`: `latent * std + mean`."""
        mean, std = self._statistics(latent)
        return latent * std + mean

    def new_frames(self, latent: Tensor) -> Tensor:
        """Memory for the frames of a latent, channels-last, in `dtype` on `device`."""
        shape, order = self.config.decoded_shape(latent.shape), torch.channels_last_3d
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=order)

    def check_latent(self, latent: Tensor) -> None:
        """Raise the `ValueError` that `decode` would raise."""
        Relief(self.device, "a decode").finish(lambda: check_latent(latent, self.config))

    def check_frames(self, frames: Tensor) -> None:
        """Raise the `ValueError` that `encode` would raise for the frames."""
        Relief(self.device, "an encode").finish(lambda: check_frames(frames, self.config))

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
    ) -> Plan:
        """How a stream of any length would run, and the memory that it takes.

        Args:
            height: Of the frames that go in or, but for 2x decoders, come out.
            width: Likewise.
            options: What is asked of the stream.
            encode: For encoding; else for decoding.
            single_frame: For a video of one frame.
            device: Where the work will be done; None: where the weights are.
            cuts: Tiles may be chosen where whole frames do not fit.

        Returns:
            The plan, for a batch of one.

        Raises:
            ValueError: The checkpoint has no encoder to speak of.
        """
        network = self._encoding() if encode else self.decoder
        step = self.config.spatial_compression
        dtype = options.dtype or (self.encode_dtype if encode else self.dtype)
        size = 1, height // step, width // step
        device = device or self.device
        dtype = compute_dtype(dtype, device)
        job = job_of(network, self.config, size, dtype, device, single_frame=single_frame)
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        return make_plan(job, limit, chunk=options.chunk, tile=options.tile, cuts=cuts)

    def weight_bytes(self) -> int:
        """Bytes of the parameters and of what was derived from them so far."""
        own = sum(parameter.nbytes for parameter in self.parameters())
        return own + sum(conv.form_bytes() for conv in self._convs())

    def drop_derived(self) -> None:
        """Free what was derived from the weights; it is derived again when it is needed."""
        for conv in self._convs():
            conv.forms.clear()

    def _stream(
        self,
        network: Network,
        options: StreamOptions,
        pieces: Tensor | Iterable[Tensor],
        source: Iterator[Tensor],
        *,
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor], Tensor] | Output,
        relief: Relief,
        single_frame: bool,
        begins: bool = True,
    ) -> Iterator[Tensor]:
        """Run the checked pieces of one video through the layers."""
        encodes = network is self.encoder
        dtype = options.dtype or (self.encode_dtype if encodes else self.dtype)
        dtype = compute_dtype(dtype, self.device)
        chunk = options.chunk
        if chunk is None and not isinstance(pieces, Tensor):
            chunk = 1  # what comes in pieces is wanted back so
        limit = self.limit_bytes if options.limit_bytes is None else options.limit_bytes
        session = VideoSession(
            network,
            self.config,
            replace(options, chunk=chunk, limit_bytes=limit),
            dtype,
            enter,
            leave,
            relief,
            single_frame=single_frame,
            begins=begins,
            learns=any(parameter.requires_grad for parameter in self.parameters()),
            full=dtype == torch.float32 and not self.allow_tf32,
            graphs=self.graphs,
            skips=encodes and self.skips_static,
        )
        return session.run(source)

    def _latents_of(self, frames: range) -> tuple[int, int]:
        """The latents that frames are made of: the first, and the one after the last."""
        per_latent = self.config.temporal_compression
        first, last = (-(-frame // per_latent) for frame in (frames.start, frames.stop - 1))
        if self.config.family == SEEDVR2:  # has rules for what follows its first frame
            return 0, last + 1
        return max(0, first - latents_before(self.decoder)), last + 1

    def _encoding(self) -> Network:
        if self.encoder is None:
            raise ValueError("the checkpoint has no encoder; only decode works with it")
        return self.encoder

    def _statistics(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(latent, "latent", self.config.latent_channels)
        mean, std = self.config.latent_mean, self.config.latent_std
        shape = (1, -1, 1, 1, 1)
        return latent.new_tensor(mean).view(shape), latent.new_tensor(std).view(shape)

    def _convs(self) -> Iterator[Conv]:
        return (module for module in self.modules() if isinstance(module, Conv))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "VideoVAE":
        """Move or cast the weights (`.to`, `.half`, ...), and with them the computation."""
        networks = self.decoder, self.decoder if self.encoder is None else self.encoder
        before = [next(network.parameters()).dtype for network in networks]
        super()._apply(fn, recurse)
        after = [next(network.parameters()).dtype for network in networks]
        if after[0] != before[0]:
            self.dtype = after[0]
        if self.encoder is None:
            self.encode_dtype = self.dtype
        elif after[1] != before[1]:
            self.encode_dtype = after[1]
        return self
