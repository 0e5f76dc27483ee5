"""The precision of a VAE, as its attributes."""

import contextlib
import functools
import weakref
from concurrent.futures import CancelledError

import torch
from torch import Tensor

from ....kernels import Job, default_device, int8_lacks, log_once, submit
from ...layers.conv import PointwiseConv
from ...layers.inputs.coding import Coding
from ...layers.oom import Relief
from ...models.base import Network
from ...models.config import VAEConfig
from ...models.patchify import fold_pixels
from ..executors import Team
from ..options import AUTOMATIC, StreamOptions
from ..precision import compute_dtype, decode_dtype
from ..shards import StreamShards
from .layers import Choice, Int8Choices, Int8Layers, probe

AUTO, INT8 = "auto", "int8"

PRECISIONS = (AUTO, INT8)

# Side of the measured frames in pixels; number and deviation of those of an encode.
_PIXELS, _FRAMES, _CONTRAST = 48, 9, 0.4

# Why there is no "fp8": float8 has 3 bits of a mantissa. The same convolutions lose 48.4 - 39.0 dB
# more in it than in int8, and no GPU with float8 multiplies it faster than int8.
_FP8 = "it loses 9 dB more than int8, at the same speed"


class Int8VAE:
    """The part of a VAE that says which of its convolutions run in int8.

    Attributes:
        config: Configuration of the VAE.
        device: Device of the weights.
        dtype: Dtype of decoding.
        encode_dtype: Dtype of encoding.
        allow_fp16: A decode in bfloat16 may compute in float16.
        encoder: The encoder, or None.
        decoder: The decoder.
        conv2: The convolution before the decoder, or None.
        team: The devices that share its videos.
        shards: The ranks that share its videos.
    """

    config: VAEConfig
    device: torch.device
    dtype: torch.dtype
    encode_dtype: torch.dtype
    allow_fp16: bool
    encoder: Network | None
    decoder: Network
    conv2: PointwiseConv | None
    team: Team
    shards: StreamShards | None
    _precision = _encode_precision = AUTO

    _int8: Int8Choices

    @property
    def precision(self) -> str:
        """The precision of a decode: "auto", or "int8".

        With "int8" the large convolutions after a norm multiply 8-bit numbers, at up to four times
        the speed. `int8_layers` chooses those that cost least, so that the frames have at most
        about 1 dB less than in bfloat16. They are chosen in the background, once for these weights
        on a device; until then decodes are those of "auto". A decode whose values are out of their
        range continues in 16 bits. Where int8 does not pay, the log has the reason, and the
        precision is that of "auto".
        """
        return self._precision

    @precision.setter
    def precision(self, precision: str) -> None:
        """Set the `precision`, or raise a `ValueError` of one line for another one."""
        self._precision = self._checked(precision, "precision")
        self._begin()

    @property
    def encode_precision(self) -> str:
        """The precision of an encode, as `precision`.

        A latent in int8 is another start of a sampling, which turns a small difference into another
        picture. So this is apart.
        """
        return self._encode_precision

    @encode_precision.setter
    def encode_precision(self, precision: str) -> None:
        """Set the `precision` of an encode, or raise a `ValueError` for another one."""
        self._encode_precision = self._checked(precision, "encode_precision")
        self._begin()

    def int8_layers(self, dtype: torch.dtype, *, encode: bool = False) -> Int8Layers:
        """Return the convolutions that run in int8, which are measured with these weights.

        Args:
            dtype: Dtype of the other layers.
            encode: Those of the encoder; otherwise those of the decoder.

        Returns:
            The choice. The first call takes as long as about 30 decodes of 48 x 48 pixels.

        Raises:
            ValueError: Int8 is not supported, or does not pay.
        """
        if reason := self._lacks_int8(dtype):
            raise ValueError(f"precision is int8, but {reason}; expected auto")
        network, choice = self._network(encode=encode), self._choice(dtype, encode=encode)
        return self._int8.of(network, self._probed(encode=encode), choice)

    def int8_dtype(
        self, options: StreamOptions = AUTOMATIC, *, encode: bool = False
    ) -> torch.dtype:
        """Return the dtype of the other layers of a video that has some in int8.

        Args:
            options: Options of the decode.
            encode: The video is encoded.

        Returns:
            The dtype.
        """
        if encode:
            return compute_dtype(options.dtype or self.encode_dtype, self.device)
        allowed = self.allow_fp16 and options.dtype is None
        return decode_dtype(options.dtype or self.dtype, self.device, allow_fp16=allowed, deep=True)

    def planned_codes(
        self, dtype: torch.dtype, device: torch.device, *, encode: bool
    ) -> frozenset[str]:
        """Return the convolutions in int8 of the next video, as far as they are known.

        Args:
            dtype: Dtype of the other layers.
            device: Device of the video.
            encode: The video is encoded.

        Returns:
            Their names.
        """
        if (self._encode_precision if encode else self._precision) == AUTO:
            return frozenset()
        return self._int8.known((_part(encode=encode), dtype, device))

    def coding(self, dtype: torch.dtype, *, encode: bool = False) -> Coding | None:
        """Return what a new video has in int8; None: nothing.

        Args:
            dtype: Dtype of the other layers.
            encode: The video is encoded.

        Returns:
            The coding.
        """
        wish = self._encode_precision if encode else self._precision
        if wish == AUTO:
            return None
        if reason := self._lacks_int8(dtype):
            log_once(f"int8 is not used: {reason}")
            return None
        relief = Relief(self.device, "the choice of int8")
        network, choice = self._network(encode=encode), self._choice(dtype, encode=encode)
        layers = relief.attempt(lambda: self._int8.find(network, choice))
        if layers is None:
            self._job(choice, encode=encode)
            task = "encode" if encode else "decode"
            log_once(
                f"int8 begins with a later {task}: its layers are being chosen in the background"
            )
            return None
        if layers.rows and not layers.names:
            log_once("int8 is not used: every convolution would cost more than 1 dB")
        return Coding(layers.names, self.device) if layers.names else None

    def _begin(self) -> None:
        """Let the background choose, unless the weights are on their way to a GPU."""
        wished = INT8 in (self._precision, self._encode_precision)
        if wished and self.device.type == default_device().type:
            self._jobs()

    def _jobs(self) -> list[Job]:
        """Return the jobs that prepare the next videos, after a submission of those that lack."""
        wishes = (False, self._precision), (True, self._encode_precision)
        return [
            self._job(self._choice(self.int8_dtype(encode=encode), encode=encode), encode=encode)
            for encode, wish in wishes
            if wish == INT8 and (self.encoder is not None or not encode)
        ]

    def _job(self, choice: Choice, *, encode: bool) -> Job:
        """Return the job that makes a choice, submitted if it is not waiting or running."""
        job = self._int8.jobs.get(choice)
        if job is None or job.is_done:
            work = functools.partial(_choose, weakref.ref(self), choice, encode=encode)
            job = self._int8.jobs[choice] = submit("the choice of int8", work)
        return job

    def _choice(self, dtype: torch.dtype, *, encode: bool) -> Choice:
        return _part(encode=encode), dtype, self.device

    def _network(self, *, encode: bool) -> Network:
        network = self.encoder if encode else self.decoder
        if network is None:
            raise ValueError("the checkpoint has no encoder; only decode works with it")
        return getattr(network, "_orig_mod", network)  # `torch.compile` wraps a module

    @torch.no_grad()
    def _probed(self, *, encode: bool) -> Tensor:
        """Return the input `[B, C, T, H, W]` of the encoder or the decoder for a measurement."""
        config, place = self.config, self.device
        size = _PIXELS // config.spatial_compression
        if encode:
            size *= config.spatial_compression
            frames = probe(config.image_channels, size, frames=_FRAMES).mul(_CONTRAST)
            x = fold_pixels(frames.clamp(-1, 1).to(place), config.patch_size)
        else:
            x = probe(config.latent_channels, size).to(place)
            x = x / config.latent_scale if self.conv2 is None else self.conv2(x)
        # No picture comes after another.
        return x.transpose(0, 2) if config.is_of_pictures else x

    def _lacks_int8(self, dtype: torch.dtype) -> str:
        """Return why int8 is not used with layers in `dtype`; empty: it can be."""
        if len(self.team.crew.devices) > 1 or self.shards is not None:
            return "several devices share the video, which int8 does not support"
        return int8_lacks(self.device, dtype)

    def _checked(self, precision: str, name: str) -> str:
        """Return a valid `precision`, or raise a `ValueError` for the argument `name`."""
        if precision == "fp8":
            raise ValueError(f"{name} is 'fp8', but {_FP8}; expected auto or int8")
        if precision not in PRECISIONS:
            raise ValueError(f"{name} is {precision!r}; expected auto or int8")
        return precision


def _part(*, encode: bool) -> str:
    return "encoder" if encode else "decoder"


def _choose(vae: weakref.ref[Int8VAE], choice: Choice, *, encode: bool) -> None:
    """Make a choice for a VAE, until the VAE is freed."""
    found = vae()
    if found is None or found.device != choice[2] or found._lacks_int8(choice[1]):
        return
    choices, network, x = found._int8, found._network(encode=encode), found._probed(encode=encode)
    del found
    with contextlib.suppress(CancelledError):
        choices.of(network, x, choice, lambda: vae() is not None)
