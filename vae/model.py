"""The VAE: frames to latents and back, whole or as a stream."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from ..kernels import check_quality, frames_to_images, pixel_shuffle_3d
from .budget import make_plan
from .cache import TemporalCache
from .compiling import eager
from .config import SEEDVR2, VAEConfig
from .conv import Conv, PointwiseConv, drop_stale_forms
from .inputs import (
    check_frames,
    check_latent,
    check_tensor,
    checked,
    chunk_of,
)
from .layouts import make_decoder, make_encoder
from .network import Layer, Network
from .pixels import COLUMN_FIRST, ROW_FIRST, fold_pixels
from .steps import Steps
from .stream import rechunk


class VideoVAE(nn.Module):
    """A causal video VAE of the Wan family, or that of SeedVR2.

    Made by `load_vae`. The parameters have the names of the original checkpoint. Decoding and
    encoding keep no state in the object, so threads may share it. Every result is exact for any
    chunk: it differs from the frame by frame one by rounding alone.

    Args:
        config: What the weights are.
        dtype: The dtype that it decodes in.
        encode_dtype: The dtype that it encodes in.
        quality: "fast" or "exact"; see the attribute.

    Attributes:
        config: What the weights are.
        dtype: The dtype that it decodes in, and of the frames that come out.
        encode_dtype: The dtype that it encodes in, and of the latents that come out.
        limit_bytes: Memory that a step may take beside the weights; None: a part of what is free.
        quality: "fast": every norm and activation is one pass that rounds once, from float32, as
            the fastest backend does it. "exact": each op has the very bits of the reference.
        graphs: On a GPU, record the steps of chunks that repeat as a CUDA graph and replay it: less
            work for the CPU, for memory of the graph's own. Off until a gain is measured.
        skips_still: Encode frames that do not change until they make no difference any more, and
            repeat what they gave.
        allow_tf32: In float32, leave PyTorch's own switches as they are, so that TF32 (or bf16
            products on a CPU) is used where they allow it. By default float32 means float32.
    """

    def __init__(
        self,
        config: VAEConfig,
        dtype: torch.dtype,
        encode_dtype: torch.dtype,
        quality: str = "fast",
    ) -> None:
        super().__init__()
        check_quality(quality)
        self.quality = quality
        self.config = config
        self.dtype = dtype
        self.encode_dtype = encode_dtype
        self.limit_bytes: int | None = None
        self.allow_tf32 = False
        self.graphs = False
        self.skips_still = True
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
        return torch.cat(list(self.encode_stream(frames, chunk)), dim=2)

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
        frames = self.new_frames(latent)
        for _ in self.decode_stream(latent, chunk, out=frames):
            pass
        return frames

    @eager
    def encode_stream(
        self,
        pieces: Tensor | Iterable[Tensor],
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        limit_bytes: int | None = None,
    ) -> Iterator[Tensor]:
        """Encode a video that comes in pieces; latents leave as soon as their frames are there.

        Args:
            pieces: `[B, C, t, H, W]` each, any `t >= 1`, as for `encode`; or one tensor.
            chunk: As for `encode`; None for an iterable: one latent at a time.
            dtype: Of this computation; None: `encode_dtype`.
            limit_bytes: Memory that a step of this stream may take; None: as the VAE has it.

        Returns:
            An iterator of latents `[B, C_latent, n, H / 8, W / 8]`: the first alone, then `chunk`
            at a time.

        Raises:
            ValueError: As for `encode`; for a piece when it is reached.
        """
        return self._encode_stream(
            pieces, chunk, dtype, limit_bytes, scale=self.config.latent_scale
        )

    @eager
    def mean_stream(
        self,
        pieces: Tensor | Iterable[Tensor],
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        limit_bytes: int | None = None,
    ) -> Iterator[Tensor]:
        """`encode_stream` of the bare mean of the posterior, which `config.latent_scale` scales."""
        return self._encode_stream(pieces, chunk, dtype, limit_bytes, scale=1)

    def _encode_stream(
        self,
        pieces: Tensor | Iterable[Tensor],
        chunk: int | None,
        dtype: torch.dtype | None,
        limit_bytes: int | None,
        *,
        scale: float,
    ) -> Iterator[Tensor]:
        encoder = self._encoding()
        chains = encoder.chains()
        patch = self.config.patch_size
        chains[0].insert(0, lambda x, _: fold_pixels(x, patch, COLUMN_FIRST))

        def finish(x: Tensor, _: TemporalCache) -> Tensor:
            latents = self.config.latent_channels
            mean = x[:, :latents] if self.conv1 is None else self.conv1(x, latents)
            return mean if scale == 1 else mean * scale

        source = checked(pieces, self.check_frames)
        chunk = chunk_of(pieces, chunk)
        lone = isinstance(pieces, Tensor) and self.config.latent_frames(pieces.shape[2]) == 1
        return self._stream(encoder, chains, finish, source, chunk, dtype, limit_bytes, lone=lone)

    @eager
    def decode_stream(
        self,
        latent: Tensor | Iterable[Tensor],
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        images: Tensor | None = None,
        limit_bytes: int | None = None,
    ) -> Iterator[Tensor]:
        """Decode a latent and give the frames away as they are done.

        The memory that it takes does not depend on the length of the video. Of an iterable no
        latent is asked for before the frames of those before it have left.

        Args:
            latent: `[B, C_latent, t, h, w]`, or an iterable of such, one after the other in time.
            chunk: As for `decode`; None for an iterable: one latent at a time.
            dtype: Of this computation; None: `dtype` of the VAE.
            out: `[B, C, T, H, W]` of the whole video, of any dtype, strides and device: each piece
                is written there, and the piece that comes is the part of it. None: new tensors.
            images: `[B, T, H, W, C]` of the whole video, of a float dtype or uint8, of any strides
                and device: instead of frames each piece is images, clamped to [0, 1] or in 8 bits
                (see `frames_to_images`), and the part of it that was written.
            limit_bytes: Memory that a step of this stream may take; None: as the VAE has it.

        Returns:
            An iterator of frames `[B, C, n, H, W]`, as from `decode`, or of images `[B, n, H, W,
            C]`; `n` varies.

        Raises:
            ValueError: As for `decode`, or there are both `out` and `images`; for a piece of an
                iterable when it is reached.
        """
        chains = self.decoder.chains()
        chains[0].insert(0, self._unmixed)
        finish = self._writer(out, images)
        source = checked(latent, self.check_latent)
        chunk = chunk_of(latent, chunk)
        lone = isinstance(latent, Tensor) and latent.shape[2] == 1
        return self._stream(
            self.decoder, chains, finish, source, chunk, dtype, limit_bytes, lone=lone
        )

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
        batch, channels, frames, height, width = self.config.decoded_shape(latent.shape)
        memory = (batch, frames, height, width, channels)
        with torch.inference_mode(False):
            return torch.empty(memory, dtype=self.dtype, device=self.device).movedim(-1, 1)

    def check_latent(self, latent: Tensor) -> None:
        """Raise the `ValueError` that `decode` would raise."""
        check_latent(latent, self.config)

    def check_frames(self, frames: Tensor) -> None:
        """Raise the `ValueError` that `encode` would raise for the frames."""
        check_frames(frames, self.config)

    def memory_bytes(
        self,
        height: int,
        width: int,
        *,
        encode: bool = False,
        lone: bool = False,
        limit_bytes: int | None = None,
        device: torch.device | None = None,
    ) -> int:
        """Estimate what a stream of any length takes beside weights, input and output.

        Args:
            height: Of the frames that go in or, but for 2x decoders, come out.
            width: Likewise.
            encode: For encoding; else for decoding.
            lone: For a video of one frame.
            limit_bytes: Instead of the attribute of that name.
            device: Where the work will be done; None: where the weights are.

        Returns:
            Bytes, for a batch of one and the automatic chunk.

        Raises:
            ValueError: The checkpoint has no encoder to speak of.
        """
        network = self._encoding() if encode else self.decoder
        dtype = self.encode_dtype if encode else self.dtype
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        size = self._latent_size(height, width)
        lone = lone or self.config.temporal_compression == 1
        return make_plan(network, size, dtype, device or self.device, limit, lone=lone).peak_bytes

    def encode_chunk(
        self,
        height: int,
        width: int,
        dtype: torch.dtype | None = None,
        limit_bytes: int | None = None,
    ) -> int:
        """The automatic chunk of an encode, for who hands the frames in piece by piece.

        Args:
            height: Of the frames.
            width: Of the frames.
            dtype: Of this computation; None: `encode_dtype`.
            limit_bytes: As for `encode_stream`.

        Returns:
            Latents per step.
        """
        size = self._latent_size(height, width)
        dtype = dtype or self.encode_dtype
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return make_plan(self._encoding(), size, dtype, self.device, limit).chunk

    def weight_bytes(self) -> int:
        """Bytes of the parameters and of what was derived from them so far."""
        own = sum(parameter.nbytes for parameter in self.parameters())
        return own + sum(conv.form_bytes() for conv in self._convs())

    def drop_derived(self) -> None:
        """Free what was derived from the weights; it is derived again when it is needed."""
        for conv in self._convs():
            conv.drop_forms()

    def _stream(
        self,
        network: Network,
        chains: list[list[Layer]],
        finish: Layer,
        source: Iterator[Tensor],
        chunk: int | None,
        dtype: torch.dtype | None,
        limit_bytes: int | None,
        *,
        lone: bool,
    ) -> Iterator[Tensor]:
        """Run the checked pieces of one video through the layers, and each result by `finish`."""
        encodes = network is self.encoder
        if dtype is None:
            dtype = self.encode_dtype if encodes else self.dtype
        first = next(source, None)
        if first is None:
            raise ValueError(f"no {'frames' if encodes else 'latents'} came; expected one or more")
        compression = self.config.spatial_compression if encodes else 1
        latent_size = first.shape[0], first.shape[3] // compression, first.shape[4] // compression
        pictures = self.config.temporal_compression == 1
        lone = lone or pictures
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        plan = make_plan(network, latent_size, dtype, self.device, limit, lone=lone)
        chunk = plan.chunk if chunk is None else chunk
        group = self.config.temporal_compression if encodes else 1
        size = 1 if pictures else None if chunk == -1 else chunk * group
        runs = rechunk(itertools.chain([first], source), size)
        cache = TemporalCache(lone=lone, band_bytes=plan.part_bytes)
        steps = Steps(
            chains,
            finish,
            cache,
            plan.part_bytes,
            self.device,
            dtype,
            self.quality,
            full=dtype == torch.float32 and not self.allow_tf32,
            learns=any(parameter.requires_grad for parameter in self.parameters()),
            graphs=self.graphs,
            network=(self.config, encodes),
            skips=encodes and self.skips_still,
        )
        drop_stale_forms(module for module in network.modules() if isinstance(module, Conv))
        dropped = 0
        for run in runs:
            if not cache.first and run.shape[2] % group:
                dropped = run.shape[2] % group
                run = run[:, :, : run.shape[2] - dropped]
            if run.shape[2]:
                yield from steps.run(run)
            cache.first = pictures
        if dropped:
            warnings.warn(
                f"the last {dropped} frames were dropped; the VAE takes 4 n + 1 frames",
                UserWarning,
                stacklevel=3,
            )

    def _writer(self, out: Tensor | None, images: Tensor | None) -> Layer:
        """What ends a decode: the frames, written once, to where they are wanted."""
        if out is not None and images is not None:
            raise ValueError("there are both out and images; expected one of the two")
        size = self.config.patch_size * self.config.output_scale
        order = COLUMN_FIRST if self.config.patch_size > 1 else ROW_FIRST
        done = 0

        def write(x: Tensor, cache: TemporalCache) -> Tensor:
            nonlocal done
            part = slice(done, done + x.shape[2])
            done = part.stop
            target = out if images is None else images
            if target is None:
                return x if size == 1 else pixel_shuffle_3d(x, (1, size, size), order)
            with torch.inference_mode(target.is_inference()):  # else it may not be written to
                if images is not None:
                    piece = images[:, part]
                    return frames_to_images(x, patch=size, order=order, out=piece)
                return pixel_shuffle_3d(x, (1, size, size), order, out=target[:, :, part])

        return write

    def _unmixed(self, latent: Tensor, _: TemporalCache) -> Tensor:
        """What the decoder takes, of a latent."""
        if self.conv2 is None:
            return latent / self.config.latent_scale
        return self.conv2(latent)

    def _encoding(self) -> Network:
        if self.encoder is None:
            raise ValueError("the checkpoint has no encoder; only decode works with it")
        return self.encoder

    def _latent_size(self, height: int, width: int) -> tuple[int, int, int]:
        step = self.config.spatial_compression
        return 1, height // step, width // step

    def _statistics(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(latent, "latent", self.config.latent_channels)
        shape = (1, -1, 1, 1, 1)
        return (
            torch.tensor(self.config.latent_mean, dtype=latent.dtype, device=latent.device).view(
                shape
            ),
            torch.tensor(self.config.latent_std, dtype=latent.dtype, device=latent.device).view(
                shape
            ),
        )

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
