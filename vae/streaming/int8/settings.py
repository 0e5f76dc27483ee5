"""The precision of a VAE, as its attributes."""

import torch
from torch import Tensor

from ....kernels import first_line, int8_lacks, log_once
from ...layers.conv import PointwiseConv
from ...layers.inputs.coding import Coding
from ...layers.oom import Relief
from ...models.base import Network
from ...models.config import VAEConfig
from ...models.patchify import fold_pixels
from ..executors import Team
from ..shards import StreamShards
from .layers import Int8Choices, Int8Layers, probe

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
        encoder: The encoder, or None.
        decoder: The decoder.
        conv2: The convolution before the decoder, or None.
        team: The devices that share its videos.
        shards: The ranks that share its videos.
    """

    config: VAEConfig
    device: torch.device
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
        about 1 dB less than in bfloat16. A decode whose values are out of their range continues in
        16 bits. Where int8 does not pay, the log has the reason, and the precision is that of
        "auto".
        """
        return self._precision

    @precision.setter
    def precision(self, precision: str) -> None:
        """Set the `precision`, or raise a `ValueError` of one line for another one."""
        self._precision = self._checked(precision, "precision")

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
        network = self.encoder if encode else self.decoder
        if network is None:
            raise ValueError("the checkpoint has no encoder; only decode works with it")
        with torch.no_grad():
            x = self._probed(encode=encode)
        if self.config.is_of_pictures:
            x = x.transpose(0, 2)  # no picture comes after another
        return self._int8.of(network, "encoder" if encode else "decoder", x, dtype)

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
        return self._int8.known("encoder" if encode else "decoder", dtype, device)

    def coding(self, dtype: torch.dtype, source: object, *, encode: bool = False) -> Coding | None:
        """Return what a new video has in int8; None: nothing.

        Args:
            dtype: Dtype of the other layers.
            source: `[B, C, T, H, W]`, or anything else as long as it is unknown.
            encode: The video is encoded.

        Returns:
            The coding.
        """
        wish = self._encode_precision if encode else self._precision
        records = isinstance(source, Tensor) and source.requires_grad and torch.is_grad_enabled()
        if wish == AUTO or records:
            return None
        relief, names = Relief(self.device, "the choice of int8"), frozenset()
        if not (reason := self._lacks_int8(dtype)):
            try:
                names = relief.attempt(lambda: self.int8_layers(dtype, encode=encode)).names
            except Exception as error:
                reason = first_line(error)
            else:
                reason = "" if names else "every convolution would cost more than 1 dB"
        if reason:
            log_once(f"int8 is not used: {reason}")
            return None
        return Coding(names, self.device)

    def _probed(self, *, encode: bool) -> Tensor:
        """Return the input `[1, C, T, H, W]` of the encoder or the decoder for a measurement."""
        config, place = self.config, self.device
        size = _PIXELS // config.spatial_compression
        if encode:
            size *= config.spatial_compression
            frames = probe(config.image_channels, size, frames=_FRAMES).mul(_CONTRAST)
            return fold_pixels(frames.clamp(-1, 1).to(place), config.patch_size)
        x = probe(config.latent_channels, size).to(place)
        return x / config.latent_scale if self.conv2 is None else self.conv2(x)

    def _lacks_int8(self, dtype: torch.dtype) -> str:
        """Return why int8 is not used with layers in `dtype`; empty: it can be."""
        if len(self.team.crew.devices) > 1 or self.shards is not None:
            return "several devices share the video, which int8 does not support"
        networks = self.decoder, self.encoder, self.conv2
        if any(p.requires_grad for each in networks if each is not None for p in each.parameters()):
            return "the weights are trained"
        return int8_lacks(self.device, dtype)

    def _checked(self, precision: str, name: str) -> str:
        """Return a valid `precision`, or raise a `ValueError` for the argument `name`."""
        if precision == "fp8":
            raise ValueError(f"{name} is 'fp8', but {_FP8}; expected auto or int8")
        if precision not in PRECISIONS:
            raise ValueError(f"{name} is {precision!r}; expected auto or int8")
        return precision
