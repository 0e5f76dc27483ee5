"""Errors of a tiled decode: ComfyUI's `VAEDecodeTiled` with its own VAE and with this pack's.

`python tests/benchmarks/bench_seams.py` decodes a slowly moving smooth gradient, encoded by the
bundled VAE, with and without tiles in this process. It reports the difference in 8-bit levels, and
the largest step of brightness between two frames. Rows are appended to `results.jsonl`.
"""

import logging
import math
import tempfile
from pathlib import Path

import bind  # noqa: F401
import torch
from safetensors.torch import load_file
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, node, stock_vae
from fast_video_vae.vae.demo import VAE_PATH


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
def decoded(name: str, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the whole and tiled IMAGEs `[T, H, W, 3]` of the gradient for `comfyui` and `ours`.

    The bundled weights are written to a file in `folder`, in float32.
    """
    state = {name: tensor.float() for name, tensor in load_file(VAE_PATH).items()}
    vaes = {"comfyui": stock_vae(state), "ours": fast_vae(state, folder)}
    size, inputs = _SETTINGS[name]
    (latent,) = node("VAEEncode", vae=vaes["ours"], pixels=gradient(*size))
    return {
        name: (
            node("VAEDecode", vae=vae, samples=latent)[0],
            node("VAEDecodeTiled", vae=vae, samples=latent, **inputs)[0],
        )
        for name, vae in vaes.items()
    }


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


def _inputs(*values: int) -> dict[str, int]:
    """Return the inputs of VAE Decode (Tiled): sizes in pixels, times in frames."""
    names = "tile_size", "overlap", "temporal_size", "temporal_overlap"
    return dict(zip(names, values, strict=True))


# Frames, height and width of a clip, and the node's inputs.
_SETTINGS = {
    # The smallest tiles that the node allows, for little memory.
    "smallest": ((33, 256, 256), _inputs(64, 64, 8, 4)),
    "middle": ((33, 256, 256), _inputs(128, 32, 16, 8)),
    # The node's defaults, on a clip of more than one tile in width and time.
    "defaults": ((73, 160, 640), _inputs(512, 64, 64, 8)),
}


def _case(name: str) -> str:
    size, inputs = _SETTINGS[name]
    tile, overlap, time, time_overlap = inputs.values()
    overlap = min(overlap, tile // 4)  # as the node limits it
    sizes = f"{'x'.join(map(str, size))}, tiles of {tile}, overlap {overlap}"
    return f"{sizes}; {time} frames, overlap {time_overlap}"


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
            _report(_case(name), decoded(name, Path(folder)), args.out)


def _report(case: str, found: dict[str, tuple[Tensor, Tensor]], out: Path) -> None:
    from comfyui_version import __version__

    errors = {name: error(*images) for name, images in found.items()}
    apart = 255 * (found["ours"][0] - found["comfyui"][0]).abs().max().item()
    logging.info("%s; without tiles the two are %.4f levels apart", case, apart)
    for name, each in errors.items():
        values = {key: value if value is None else round(value, 6) for key, value in each.items()}
        logging.info("  %-9s%s", name, values)
        values["version"] = record.commit() if name == "ours" else __version__
        values["untiled_apart_levels"] = round(apart, 6)
        record.append(out, "bench_seams", case, implementation=name, **values)


if __name__ == "__main__":
    main()
