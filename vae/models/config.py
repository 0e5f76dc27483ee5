"""The configuration of a VAE, read from its weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...kernels import shown
from .latent_stats import latent_statistics

# Keys that identify a layout, present since the first release of each.
WAN_KEY = "decoder.middle.0.residual.0.gamma"
_WAN22_KEY = "decoder.upsamples.0.upsamples.0.residual.2.weight"
SEEDVR2_KEY = "decoder.up_blocks.2.upsamplers.0.upscale_conv.weight"

WAN21 = "wan2.1"
WAN22 = "wan2.2"
QWEN21 = "qwen-image-2.1"
SEEDVR2 = "seedvr2"

# Most channels of a layer; the widest published VAE has 2048.
_MAX_WIDTH = 1 << 16

# Groups of every norm of SeedVR2.
SEEDVR2_GROUPS = 32

# Widths of the stages over the base width (`dim_mult`), by the number of stages.
_MULTIPLES = {4: (1, 2, 4, 4), 5: (1, 2, 4, 8, 8)}

# Tensors whose first dimension is a stage's width: the first convolution, and each stage's first
# block. The name of the first one, and for encoder and decoder the pattern of the others with the
# step of its number.
_ANCHORS = {
    WAN21: (
        "conv1",
        ("encoder.downsamples.{}.residual.6.weight", 3),
        ("decoder.upsamples.{}.residual.6.weight", 4),
    ),
    WAN22: (
        "conv1",
        ("encoder.downsamples.{}.downsamples.0.residual.6.weight", 1),
        ("decoder.upsamples.{}.upsamples.0.residual.6.weight", 1),
    ),
    SEEDVR2: (
        "conv_in",
        ("encoder.down_blocks.{}.resnets.0.conv1.weight", 1),
        ("decoder.up_blocks.{}.resnets.0.conv1.weight", 1),
    ),
}

_WAN21_LATENTS = 16

# The published VAE of the Wan 2.2 layout: base widths, latent channels, and the side of a patch.
_WAN22_ENCODER, _WAN22_DECODER, _WAN22_LATENTS, _WAN22_PATCH = 160, 256, 48, 2

# The published widths of SeedVR2, and the factor of its latents (configs_3b/main.yaml:
# vae.scaling_factor).
_SEEDVR2_WIDTHS = (128, 128, 256, 512, 512), (512, 512, 512, 256, 128)
_SEEDVR2_LATENTS, _SEEDVR2_SCALE = 16, 0.9152

# The models with latents of a number of channels.
MODELS = {16: "Wan 2.1, 2.2 14B, Qwen-Image, SeedVR2", 48: "Wan 2.2 5B", 64: "Qwen-Image 2.1"}

Shapes = Mapping[str, tuple[int, ...]]
Widths = tuple[tuple[int, ...], tuple[int, ...]]  # of encoder and decoder


class LayoutError(ValueError):
    """The weights belong to another network than those of this package."""


@dataclass(frozen=True)
class VAEConfig:
    """Configuration of a VAE."""

    # `wan2.1` (Wan 2.1, Wan 2.2 14B, Qwen-Image; pruned, layered and 2x versions), `wan2.2` (Wan
    # 2.2 5B), `qwen-image-2.1` or `seedvr2`.
    family: str
    latent_channels: int
    image_channels: int  # 3, or 4 with alpha
    output_scale: int  # size of decoded frames over that of encoded ones: 2 for upscaling decoders
    # Channels of the first convolution and of the stages in order; None: the file has no encoder.
    encoder_widths: tuple[int, ...] | None
    decoder_widths: tuple[int, ...]
    spatial_compression: int  # pixels per latent pixel, in height and in width
    # Frames per latent, except for the first, which is one frame; 1: every frame is a picture.
    temporal_compression: int
    latent_mean: tuple[float, ...]  # of each channel
    latent_std: tuple[float, ...]  # standard deviations
    patch_size: int = 1  # side of the pixel blocks that the network sees as one pixel
    taps: int = 3  # of a convolution, in time; 1: every frame is a picture
    latent_scale: float = 1.0  # factor between the posterior mean and the latent

    @property
    def is_of_pictures(self) -> bool:
        """Whether each frame is a picture of its own, which depends on no other frame."""
        return self.temporal_compression == 1

    @property
    def is_of_one_frame(self) -> bool:
        """Whether the weights are what a VAE of videos needs for one frame, and no video."""
        return self.taps == 1 and self.family != QWEN21

    @property
    def encoder_width(self) -> int | None:
        """Base width of the encoder, its channels at full size; None: no encoder."""
        return None if self.encoder_widths is None else self.encoder_widths[0]

    @property
    def decoder_width(self) -> int:
        """Base width of the decoder, its channels at full size: 96 for Wan 2.1, 24 for LightVAE."""
        return self.decoder_widths[-1]

    def standard(self) -> "VAEConfig":
        """Return the published VAE of this layout: with an encoder, usual widths, no upscaling."""
        if self.family == SEEDVR2:
            return _config(SEEDVR2, _SEEDVR2_LATENTS, 3, *_SEEDVR2_WIDTHS)
        if self.family == WAN21:
            base = self.decoder_width
            widths = _standard_widths(base, base, 4)
            return _config(WAN21, _WAN21_LATENTS, self.image_channels, *widths)
        widths = _standard_widths(_WAN22_ENCODER, _WAN22_DECODER, 4)
        return _config(WAN22, _WAN22_LATENTS, 3, *widths, patch_size=_WAN22_PATCH)

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames for `frames` frames."""
        return (frames - 1) // self.temporal_compression + 1

    def frames(self, latent_frames: int) -> int:
        """Return the number of frames for `latent_frames` latent frames."""
        return (latent_frames - 1) * self.temporal_compression + 1

    def decoded_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
        """Return the shape `[B, C, T, H, W]` of the frames of a latent with `shape`."""
        batch, _, latent_frames, height, width = shape
        scale = self.spatial_compression * self.output_scale
        frames = self.frames(latent_frames)
        return batch, self.image_channels, frames, height * scale, width * scale


def read_configs(shapes: Shapes) -> list[VAEConfig]:
    """Return the configurations of a state dict: of usual widths, and of each stage's own width."""
    if SEEDVR2_KEY in shapes:
        return [_read_seedvr2(shapes)]
    if WAN_KEY not in shapes:
        such = f", such as {shown(min(shapes), 32)}" if shapes else ""
        lacks = f"no {WAN_KEY} in {len(shapes)} keys{such}"
        raise LayoutError(f"not a Wan, Qwen-Image or SeedVR2 VAE ({lacks})")
    latent_channels = _size(shapes, "decoder.conv1.weight", 1)
    has_encoder = any(key.startswith("encoder.") for key in shapes)
    encoder_base = _size(shapes, "encoder.conv1.weight", 0) if has_encoder else 0
    decoder_base = _size(shapes, "decoder.head.0.gamma", 0)
    in_channels = _size(shapes, "encoder.conv1.weight", 1) if has_encoder else None
    out_channels = _size(shapes, "decoder.head.2.weight", 0)
    head = shapes["decoder.head.2.weight"]
    # Convolutions of one frame have one temporal tap, or 2D weights.
    taps = 1 if len(head) == 4 or (len(head) == 5 and head[2] == 1) else 3
    layout = WAN22 if _WAN22_KEY in shapes else WAN21
    stages = _stages(shapes) if layout == WAN22 else 4

    def config(encoder: tuple[int, ...], decoder: tuple[int, ...]) -> VAEConfig:
        widths = (encoder if has_encoder else None, decoder)
        if layout == WAN21:
            image_channels, scale = _image_channels(out_channels, in_channels)
            given = WAN21, latent_channels, image_channels, *widths
            return _config(*given, output_scale=scale, taps=taps)
        patch = _WAN22_PATCH
        if taps == 1 and out_channels < 3 * patch**2:
            return _config(QWEN21, latent_channels, out_channels, *widths, taps=1)
        given = WAN22, latent_channels, out_channels // patch**2, *widths
        return _config(*given, patch_size=patch, taps=taps)

    usual = _standard_widths(encoder_base, decoder_base, stages)
    own = _own_widths(shapes, layout, usual)
    return [config(*usual)] if own == usual else [config(*usual), config(*own)]


def _read_seedvr2(shapes: Shapes) -> VAEConfig:
    """Return the configuration of a SeedVR2 VAE, with each stage's own width."""
    has_encoder = any(key.startswith("encoder.") for key in shapes)
    encoder, decoder = _own_widths(shapes, SEEDVR2, _SEEDVR2_WIDTHS)
    narrow = [width for width in (*encoder, *decoder) if width % SEEDVR2_GROUPS]
    if narrow:
        expected = f"a multiple of {SEEDVR2_GROUPS}, the groups of its norms"
        raise ValueError(f"a stage has {narrow[0]} channels; expected {expected}")
    latents = _size(shapes, "decoder.conv_in.weight", 1)
    channels = _size(shapes, "decoder.conv_out.weight", 0)
    return _config(SEEDVR2, latents, channels, encoder if has_encoder else None, decoder)


def _config(
    family: str,
    latent_channels: int,
    image_channels: int,
    encoder_widths: tuple[int, ...] | None,
    decoder_widths: tuple[int, ...],
    *,
    output_scale: int = 1,
    patch_size: int = 1,
    taps: int = 3,
) -> VAEConfig:
    mean, std = latent_statistics(latent_channels)
    if family == SEEDVR2:
        mean, std = (0.0,) * latent_channels, (1.0,) * latent_channels
    return VAEConfig(
        family=family,
        latent_channels=latent_channels,
        image_channels=image_channels,
        output_scale=output_scale,
        encoder_widths=encoder_widths,
        decoder_widths=decoder_widths,
        spatial_compression=patch_size * 2 ** (len(decoder_widths) - 2),
        temporal_compression=1 if taps == 1 else 4,
        latent_mean=mean,
        latent_std=std,
        patch_size=patch_size,
        taps=taps,
        latent_scale=_SEEDVR2_SCALE if family == SEEDVR2 else 1.0,
    )


def _standard_widths(encoder: int, decoder: int, stages: int) -> Widths:
    """Return the usual widths of encoder and decoder for their base widths."""
    multiples = _MULTIPLES[stages]
    return (
        tuple(encoder * multiple for multiple in (1, *multiples)),
        tuple(decoder * multiple for multiple in (multiples[-1], *multiples[::-1])),
    )


def _stages(shapes: Shapes) -> int:
    """Return the number of stages of a decoder of the Wan 2.2 layout."""
    stages = len({key.split(".")[2] for key in shapes if key.startswith("decoder.upsamples.")})
    if stages not in _MULTIPLES:
        raise ValueError(f"the decoder has {stages} stages; expected 4 or 5")
    return stages


def _own_widths(shapes: Shapes, layout: str, usual: Widths) -> Widths:
    """Return each stage's width from the first tensor that has it, or the usual width."""
    first, *sides = _ANCHORS[layout]
    found = []
    for (pattern, step), widths in zip(sides, usual, strict=True):
        names = [f"{pattern.partition('.')[0]}.{first}.weight"]
        names += [pattern.format(step * stage) for stage in range(len(widths) - 1)]
        pairs = zip(names, widths, strict=True)
        found.append(tuple(_size(shapes, key, 0) if shapes.get(key) else w for key, w in pairs))
    return found[0], found[1]


def _size(shapes: Shapes, key: str, dim: int) -> int:
    """Return a dimension of a required tensor, in range: tensors of that size are created next."""
    if key not in shapes:
        raise ValueError(f"the checkpoint has no {key}")
    if dim >= len(shapes[key]):
        raise ValueError(f"{key} has shape {list(shapes[key])}; expected more dimensions")
    size = shapes[key][dim]
    if not 0 < size <= _MAX_WIDTH:
        expected = f"sizes of 1 to {_MAX_WIDTH}"
        raise ValueError(f"{key} has shape {list(shapes[key])}; expected {expected}")
    return size


def _image_channels(out_channels: int, in_channels: int | None) -> tuple[int, int]:
    """Return the channels of a frame, and the scale of the pixel shuffle after the decoder."""
    for channels in (3, 4) if in_channels is None else (in_channels,):
        scale = math.isqrt(out_channels // channels)
        if scale and out_channels == channels * scale * scale:
            return channels, scale
    takes = "" if in_channels is None else f" for an encoder of {in_channels} channels"
    raise ValueError(f"the decoder has {out_channels} channels{takes}; expected 3, 4, 12 or 16")
