"""What int8 costs: decodes in bfloat16 and with int8 against one in float32."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..model import VideoVAE
from ..models.config import VAEConfig
from ..streaming.int8.layers import Int8Layers, probe
from ..streaming.int8.settings import AUTO, INT8
from ..streaming.options import AUTOMATIC, StreamOptions
from ..streaming.precision import compute_dtype
from .content import Clip, denormalized
from .tables import aligned, dtype_label, finite, markdown, psnr

# Size of the clip without a given latent: pixels, and latents: the first, and two with a past.
_WIDTH, _HEIGHT, _LATENTS = 384, 160, 3


@dataclass(frozen=True)
class PrecisionReport:
    """A decode in bfloat16 and one with int8, each against float32 on the same weights."""

    clip: Clip
    dtype: torch.dtype  # of the layers that are not in int8
    bf16_dtype: torch.dtype  # float32 on a CPU whose convolutions in bfloat16 are slow
    bf16_db: float  # PSNR against float32; infinite if equal
    int8_db: float
    layers: Int8Layers

    @property
    def loss_db(self) -> float:
        """Decibels that int8 has less than bfloat16; negative where it has more."""
        return 0.0 if self.int8_db == self.bf16_db else self.bf16_db - self.int8_db

    def text(self) -> str:
        """Return the report as lines and a table with aligned columns."""
        part = f"{len(self.layers.names)} of {len(self.layers.rows)} convolutions"
        other = f"other layers in {dtype_label(self.dtype)}"
        rows = [
            ("int8", f"{part_in_int8(self.layers)} ({part}); {other}"),
            ("measured on", f"{self.clip}, PSNR against fp32 on the same weights"),
            (self._bf16_name(), _db(self.bf16_db)),
            ("with int8", f"{_db(self.int8_db)}, {self._loss()} than bf16"),
        ]
        lines = [f"{name:<14}{value}" for name, value in rows]
        return "\n".join([*lines, "", *aligned(self._rows())])

    def table(self) -> str:
        """Return the report as a Markdown table of the results, and one of the layers."""
        share = f"{self.layers.share:.1%} in {len(self.layers.names)} convolutions"
        results = [
            ["decode", "PSNR against fp32", "against bf16", "multiplications in int8"],
            [self._bf16_name(), _db(self.bf16_db), "-", "-"],
            [f"int8, {dtype_label(self.dtype)}", _db(self.int8_db), self._loss(), share],
        ]
        title = f"Precision of a decode, {self.clip}:"
        return "\n".join([title, "", *markdown(results), "", *markdown(self._rows())])

    def record(self) -> dict[str, object]:
        """Return the figures for JSON, which has no infinity."""
        layers = [
            {"name": x.name, "share": x.share, "loss_db": finite(x.loss_db), "int8": x.chosen}
            for x in self.layers.rows
        ]
        return {
            **vars(self.clip),
            "dtype": dtype_label(self.dtype),
            "bf16_psnr_db": finite(self.bf16_db),
            "int8_psnr_db": finite(self.int8_db),
            "loss_db": finite(self.loss_db),
            "int8_share": self.layers.share,
            "layers": layers,
        }

    def _rows(self) -> list[list[str]]:
        """Return the cells of the table of the layers, the first row with the headings."""
        rows = [["convolution", "multiplications", "lost alone", "runs in"]]
        for each in self.layers.rows:
            lost = f"{each.loss_db:.2f} dB" if each.loss_db >= 0.005 else "< 0.01 dB"
            chosen = "int8" if each.chosen else dtype_label(self.dtype)
            rows.append([each.name, f"{each.share:.1%}", lost, chosen])
        return rows

    def _bf16_name(self) -> str:
        return "bf16" if self.bf16_dtype == torch.bfloat16 else "bf16 in fp32"

    def _loss(self) -> str:
        if math.isnan(self.loss_db):
            return "not comparable"
        return f"{abs(self.loss_db):.2f} dB {'less' if self.loss_db >= 0 else 'more'}"


def int8_layers(vae: VideoVAE) -> Int8Layers:
    """Return the convolutions that run in int8 with the dtype of a VAE, of any precision."""
    return _layers(_with_precision(vae, INT8), vae.int8_dtype())


def part_in_int8(layers: Int8Layers) -> str:
    """Return the share of `layers` that runs in int8 in words."""
    return f"{layers.share:.0%} of the multiplications"


def compare_precision(
    vae: VideoVAE, latent: Tensor | None = None, options: StreamOptions = AUTOMATIC
) -> PrecisionReport:
    """Decode a latent in float32, in bfloat16 and with int8, on the same weights.

    The VAE is not modified, and its own precision does not matter. Without a latent it is a smooth
    one. The PSNR has a peak of 2, of all frames clamped to [-1, 1].
    """
    plain, coded = _with_precision(vae, AUTO), _with_precision(vae, INT8)
    dtype = vae.int8_dtype(options)
    layers = _layers(coded, dtype)
    if latent is None:
        latent = smooth_latent(vae.config)
    exact = _images(plain, latent, replace(options, dtype=torch.float32))
    narrow = _images(plain, latent, replace(options, dtype=torch.bfloat16))
    mixed = _images(coded, latent, options)
    count, height, width = exact.shape[1:4]
    clip, computed = (
        Clip(width, height, len(exact) * count),
        compute_dtype(torch.bfloat16, vae.device),
    )
    found = psnr(narrow, exact), psnr(mixed, exact)
    return PrecisionReport(clip, dtype, computed, *found, layers)


def smooth_latent(config: VAEConfig) -> Tensor:
    """Draw a smooth latent of a small clip with the statistics of a VAE, the same in every call."""
    height, width = (side // config.spatial_compression for side in (_HEIGHT, _WIDTH))
    frames = 1 if config.temporal_compression == 1 else _LATENTS
    drawn = probe(config.latent_channels, max(height, width), frames=frames)
    return denormalized(config, drawn[..., :height, :width])


def _with_precision(vae: VideoVAE, precision: str) -> VideoVAE:
    """Return the same weights in another precision; the copy shares all tensors and layers."""
    twin = copy.copy(vae)
    twin.precision = precision
    return twin


def _layers(vae: VideoVAE, dtype: torch.dtype) -> Int8Layers:
    """Return the choice with other layers in `dtype`, also within inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return vae.int8_layers(dtype)


def _images(vae: VideoVAE, latent: Tensor, options: StreamOptions) -> Tensor:
    """Decode `latent` to images `[B, T, H, W, C]`, float32 in [0, 1] on the CPU."""
    pieces = [piece.cpu().float() for piece in vae.decode_stream(latent, options)]
    return torch.cat(pieces, dim=2).clamp(-1, 1).add(1).div(2).movedim(1, -1)


def _db(value: float) -> str:
    if math.isnan(value):
        return "not finite"
    return "identical" if math.isinf(value) else f"{value:.2f} dB"
