"""Errors of a tiled decode: ComfyUI's `VAEDecodeTiled` with its own VAE and with this pack's.

`python tests/benchmarks/bench_seams.py` decodes a slowly moving smooth gradient, encoded by the
bundled VAE, with and without tiles in this process. It reports the difference in 8-bit levels, and
the largest step of brightness between two frames. Rows are appended to `results.jsonl`.
"""

import logging
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bind  # noqa: F401
import torch
from safetensors.torch import load_file
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, node, stock_vae
from fast_video_vae.vae.demo import VAE_PATH


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
def decoded(setting: Setting, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
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


_SETTINGS = {
    # The smallest tiles that the node allows, for little memory.
    "smallest": Setting(33, 256, 256, 64, 64, 8, 4),
    "middle": Setting(33, 256, 256, 128, 32, 16, 8),
    # The node's defaults, on a clip of more than one tile in width and time.
    "defaults": Setting(73, 160, 640, 512, 64, 64, 8),
}


def main() -> None:
    """Run the settings that the command line names."""
    parser = record.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=_SETTINGS, default=[*_SETTINGS])
    args = parser.parse_args()
    if reason := why_unavailable():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.basicConfig(**record.LOOK)
        for name in args.only:
            _report(_SETTINGS[name], decoded(_SETTINGS[name], Path(folder)), args.out)


def _report(setting: Setting, found: dict[str, tuple[Tensor, Tensor]], out: Path) -> None:
    from comfyui_version import __version__

    errors = {name: error(*images) for name, images in found.items()}
    apart = 255 * (found["ours"][0] - found["comfyui"][0]).abs().max().item()
    logging.info("%s; without tiles the two are %.4f levels apart", setting, apart)
    for name, each in errors.items():
        values = {key: value if value is None else round(value, 6) for key, value in each.items()}
        logging.info("  %-9s%s", name, values)
        record.append(
            out,
            "bench_seams",
            str(setting),
            implementation=name,
            version=record.commit() if name == "ours" else __version__,
            untiled_apart_levels=round(apart, 6),
            **values,
        )


if __name__ == "__main__":
    main()
