"""What a VAE is, as far as its weights tell, and the statistics of its latents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Per-channel statistics of the Wan 2.1 latents (wan/modules/vae.py, class WanVAE); Qwen-Image's are
# the same.
_WAN21_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_WAN21_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)

# Keys that tell one layout from another (present from the first release of each).
_WAN_KEY = "decoder.middle.0.residual.0.gamma"
_WAN22_KEY = "decoder.upsamples.0.upsamples.0.residual.2.weight"
_SEEDVR2_KEY = "decoder.up_blocks.2.upsamplers.0.upscale_conv.weight"

# Widths of the stages over the base width (`dim_mult`).
_MULTIPLES = (1, 2, 4, 4)

# The tensor whose first dimension is a stage's width: the first convolution, then each stage's
# first block.
_ENCODER_ANCHORS = (
    "encoder.conv1.weight",
    *(f"encoder.downsamples.{index}.residual.6.weight" for index in (0, 3, 6, 9)),
)
_DECODER_ANCHORS = (
    "decoder.conv1.weight",
    *(f"decoder.upsamples.{index}.residual.6.weight" for index in (0, 4, 8, 12)),
)

Shapes = Mapping[str, tuple[int, ...]]


class LayoutError(ValueError):
    """The weights are those of another network than the ones of this package."""


@dataclass(frozen=True)
class VAEConfig:
    """A VAE of the Wan 2.1 layout: Wan 2.1, Qwen-Image, pruned, layered and 2x versions.

    Attributes:
        family: Layout: `wan2.1`.
        latent_channels: Channels of a latent.
        image_channels: Channels of a frame: 3, or 4 with alpha.
        output_scale: Frames come out this many times as large as they go in: 2 for upscaling
            decoders, else 1.
        encoder_widths: Channels of the encoder's first convolution and of its four stages, from
            full size down; None: the file has no encoder.
        decoder_widths: Channels of the decoder's first convolution and of its four stages, from the
            latent's size up.
        spatial_compression: Pixels per latent, in height and in width.
        temporal_compression: Frames per latent, but for the first, which is one frame.
        latent_mean: Mean of each latent channel.
        latent_std: Standard deviation of each latent channel.
    """

    family: str
    latent_channels: int
    image_channels: int
    output_scale: int
    encoder_widths: tuple[int, ...] | None
    decoder_widths: tuple[int, ...]
    spatial_compression: int
    temporal_compression: int
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]

    @property
    def encoder_width(self) -> int | None:
        """Base width of the encoder, the channels at full size; None: no encoder."""
        return None if self.encoder_widths is None else self.encoder_widths[0]

    @property
    def decoder_width(self) -> int:
        """Base width of the decoder, the channels at full size: 96 for Wan 2.1, 24 for LightVAE."""
        return self.decoder_widths[-1]

    def standard(self) -> "VAEConfig":
        """The published VAE of this layout that is closest: all stages whole, frames as they are.

        It has an encoder, the usual multiples of the decoder's base width, and no upscaling.
        """
        base = self.decoder_width
        return replace(
            self,
            output_scale=1,
            encoder_widths=_standard_encoder(base),
            decoder_widths=_standard_decoder(base),
        )

    def latent_frames(self, frames: int) -> int:
        """Latents that hold `frames` frames."""
        return (frames - 1) // self.temporal_compression + 1

    def frames(self, latent_frames: int) -> int:
        """Frames in `latent_frames` latents."""
        return (latent_frames - 1) * self.temporal_compression + 1

    def decoded_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
        """`[B, C, T, H, W]` of the frames in a latent of shape `[B, C_latent, t, h, w]`."""
        batch, _, latent_frames, height, width = shape
        scale = self.spatial_compression * self.output_scale
        frames = self.frames(latent_frames)
        return batch, self.image_channels, frames, height * scale, width * scale


def read_configs(shapes: Shapes) -> list[VAEConfig]:
    """Read the configuration off the shapes of a state dict.

    Args:
        shapes: Shape of each tensor, under Wan's key names.

    Returns:
        The readings, the likeliest first: the standard multiples of the base width, then each
        stage's own width. Which one every tensor fits is for the loader to see.

    Raises:
        LayoutError: The names are not those of a known layout.
        ValueError: They are, but what everything else depends on is missing or misshapen.
    """
    if _WAN22_KEY in shapes:
        raise LayoutError("the checkpoint has the Wan 2.2 layout; expected the Wan 2.1 layout")
    if _SEEDVR2_KEY in shapes:
        raise LayoutError("the checkpoint has the SeedVR2 layout; expected the Wan 2.1 layout")
    if _WAN_KEY not in shapes:
        raise LayoutError(
            f"not a Wan or Qwen-Image VAE: none of its {len(shapes)} keys is {_WAN_KEY}"
            + (f"; its first is {min(shapes)}" if shapes else "")
        )
    latent_channels = _size(shapes, "decoder.conv1.weight", 1)
    has_encoder = any(key.startswith("encoder.") for key in shapes)
    in_channels = _size(shapes, "encoder.conv1.weight", 1) if has_encoder else None
    image_channels, output_scale = _image_channels(
        _size(shapes, "decoder.head.2.weight", 0), in_channels
    )
    known = latent_channels == len(_WAN21_MEAN)

    def config(encoder_widths: tuple[int, ...], decoder_widths: tuple[int, ...]) -> VAEConfig:
        return VAEConfig(
            family="wan2.1",
            latent_channels=latent_channels,
            image_channels=image_channels,
            output_scale=output_scale,
            encoder_widths=encoder_widths if has_encoder else None,
            decoder_widths=decoder_widths,
            spatial_compression=8,
            temporal_compression=4,
            latent_mean=_WAN21_MEAN if known else (0.0,) * latent_channels,
            latent_std=_WAN21_STD if known else (1.0,) * latent_channels,
        )

    decoder_base = _size(shapes, "decoder.head.0.gamma", 0)
    encoder_base = _size(shapes, "encoder.conv1.weight", 0) if has_encoder else 0
    standard_encoder = _standard_encoder(encoder_base)
    standard_decoder = _standard_decoder(decoder_base)
    standard = config(standard_encoder, standard_decoder)
    own = config(
        _widths(shapes, _ENCODER_ANCHORS, standard_encoder),
        _widths(shapes, _DECODER_ANCHORS, standard_decoder),
    )
    return [standard] if own == standard else [standard, own]


def _standard_encoder(base: int) -> tuple[int, ...]:
    return tuple(base * multiple for multiple in (1, *_MULTIPLES))


def _standard_decoder(base: int) -> tuple[int, ...]:
    return tuple(base * multiple for multiple in (_MULTIPLES[-1], *_MULTIPLES[::-1]))


def _size(shapes: Shapes, key: str, dim: int) -> int:
    """One dimension of a tensor that everything else depends on."""
    if key not in shapes:
        raise ValueError(f"the checkpoint has no {key}")
    if dim >= len(shapes[key]):
        raise ValueError(f"{key} has shape {list(shapes[key])}; expected more dimensions")
    return shapes[key][dim]


def _widths(shapes: Shapes, anchors: tuple[str, ...], standard: tuple[int, ...]) -> tuple[int, ...]:
    """Each stage's width, from its first tensor that has it; the standard one without that."""
    return tuple(
        shapes[key][0] if shapes.get(key) else width
        for key, width in zip(anchors, standard, strict=True)
    )


def _image_channels(out_channels: int, in_channels: int | None) -> tuple[int, int]:
    """Channels of a frame, and the scale that its pixels are shuffled to out of channels."""
    for channels in (3, 4) if in_channels is None else (in_channels,):
        scale = math.isqrt(out_channels // channels)
        if scale and out_channels == channels * scale * scale:
            return channels, scale
    takes = "" if in_channels is None else f" for an encoder of {in_channels} channels"
    raise ValueError(f"the decoder makes {out_channels} channels{takes}; expected 3, 4, 12 or 16")
