"""Tiled and whole decodes of a slowly moving smooth gradient, in which every seam is visible.

ComfyUI's `VAEDecodeTiled` and `VAEDecode` run with ComfyUI's VAE and with this pack's, loaded from
one file. ComfyUI must be importable: `nodes.checkout.import_comfyui`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fast_video_vae.tests.nodes.vae.pairs import fast_vae, node, stock_vae
from fast_video_vae.vae.demo import VAE_PATH

# The whole and the tiled IMAGE `[T, H, W, 3]` of `comfyui` and of `ours`.
Decoded = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """A clip and the inputs of the node; `time` in frames, sizes in pixels."""

    frames: int
    height: int
    width: int
    tile: int
    overlap: int  # the node limits it to a quarter of a tile
    time: int
    time_overlap: int

    def __str__(self) -> str:
        overlap = min(self.overlap, self.tile // 4)
        return (
            f"{self.frames}x{self.height}x{self.width}, tiles of {self.tile}, overlap {overlap}; "
            f"{self.time} frames, overlap {self.time_overlap}"
        )

    def decoded(self, vae: object, latent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the IMAGEs `[T, H, W, 3]` of `VAEDecode` and `VAEDecodeTiled`."""
        (whole,) = node("VAEDecode", vae=vae, samples=latent)
        (tiled,) = node(
            "VAEDecodeTiled",
            vae=vae,
            samples=latent,
            tile_size=self.tile,
            overlap=self.overlap,
            temporal_size=self.time,
            temporal_overlap=self.time_overlap,
        )
        return whole, tiled


def gradient(frames: int, height: int, width: int) -> Tensor:
    """Return an IMAGE `[T, H, W, 3]` of colors that move by two or three levels per frame."""
    time, y, x = torch.meshgrid(
        0.25 * torch.linspace(0, frames / 33, frames),
        0.6 * torch.linspace(0, 1, height),
        0.8 * torch.linspace(0, 1, width),
        indexing="ij",
    )
    phases = torch.tensor([0.0, 0.12, 0.3])
    return 0.5 + 0.35 * torch.sin(2 * math.pi * (0.55 * (x + y + time)[..., None] + phases))


@torch.inference_mode()
def decoded(setting: Setting, folder: Path) -> Decoded:
    """Return the whole and tiled IMAGEs `[T, H, W, 3]` of the gradient for `comfyui` and `ours`.

    The bundled weights are written to a file in `folder`, in float32.
    """
    state = {name: tensor.float() for name, tensor in load_file(VAE_PATH).items()}
    vaes = {"comfyui": stock_vae(state), "ours": fast_vae(state, folder)}
    clip = gradient(setting.frames, setting.height, setting.width)
    (latent,) = node("VAEEncode", vae=vaes["ours"], pixels=clip)
    return {name: setting.decoded(vae, latent) for name, vae in vaes.items()}


def error(whole: Tensor, tiled: Tensor) -> dict[str, float | None]:
    """Return the error of a tiled IMAGE `[T, H, W, 3]` in 8-bit levels; None: no difference."""
    difference = (tiled - whole).double()
    squared = difference.square().mean().item()
    steps = difference.mean(dim=(1, 2, 3)).diff()
    return {
        "max_levels": 255 * difference.abs().max().item(),
        "mean_levels": 255 * difference.abs().mean().item(),
        "psnr_db": -10 * math.log10(squared) if squared else None,
        "step_levels": 255 * steps.abs().max().item(),
        "relative": (difference.abs().max() / whole.abs().max()).item(),
    }
