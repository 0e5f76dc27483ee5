"""What ten hand-overs from window to window change: plain, corrected, and of joined latents.

`python tests/benchmarks/bench_joins.py` gives nine frames of three clips from window to window with
the nodes and the bundled VAE: as images by VAE Encode (Fast), without and with corrections, or as
latents by Join Latents (Fast). A JSON row per clip and way is appended to `results.jsonl`, with
PSNR against the source and the mean, saturation and contrast of each hand-over in 8-bit levels.
"""

import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import bind  # noqa: F401
import torch
from torch import Tensor

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.benchmarks.bench_seams import gradient
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.vae.pairs import ours
from fast_video_vae.vae.bench.content import Clip, moving_pictures

# The size of the hand-over, and how often it is handed over.
_FRAMES, _SIDE, _HAND_OVERS = 9, 256, 10
CORRECTIONS = 3

Figures = dict[str, list[float]]


def clips() -> dict[str, Tensor]:
    """Return the IMAGEs `[T, H, W, 3]` by name: the end of the bundled clip, and two drawn ones."""
    colors = moving_pictures(Clip(_SIDE, _SIDE, _FRAMES))[0].movedim(0, -1)
    return {
        "bundled clip": ours("DemoClip").args[0][-_FRAMES:],
        "soft colors": colors.contiguous(),
        "smooth gradient": gradient(_FRAMES, _SIDE, _SIDE),
    }


def handed_over(vae: object, source: Tensor, corrections: int | None) -> Figures:
    """Return the figures of each hand-over; corrections None: latents are handed over."""
    images, latent, found = source, None, {}
    for _ in range(_HAND_OVERS):
        if latent is None or corrections is not None:
            count = corrections or 0
            latent = ours("Encode", pixels=images, vae=vae, corrections=count).args[0]
        else:
            count = latent["samples"].shape[2]
            latent = ours("JoinLatents", samples=latent, hand_over=count, window=0).args[1]
        images = ours("Decode", samples=latent, vae=vae).args[0]
        figures = levels(images) | {"psnr": psnr(images, source)}
        for name, value in figures.items():
            found.setdefault(name, []).append(round(value, 4))
    return found


def levels(images: Tensor) -> dict[str, float]:
    """Return mean, saturation and contrast of an IMAGE in levels of 8 bits."""
    saturation = (images.amax(-1) - images.amin(-1)).mean()
    values = {"brightness": images.mean(), "saturation": saturation, "contrast": images.std()}
    return {name: 255 * value.item() for name, value in values.items()}


def psnr(images: Tensor, source: Tensor) -> float:
    """Return the PSNR of two IMAGEs in dB."""
    return -10 * math.log10((images - source).double().square().mean().item())


def summary(found: Figures) -> dict[str, object]:
    """Return what the tables show: the first and the last hand-over, and the change."""
    fields: dict[str, object] = {"hand_overs": _HAND_OVERS, "series": found}
    for name, values in found.items():
        fields |= {f"{name}_first": values[0], f"{name}_last": values[-1]}
        fields[f"{name}_change"] = round(values[-1] - values[0], 3)
    return fields


@torch.inference_mode()
def main() -> None:
    """Run all clips and ways."""
    parser = record.parser(__doc__)
    args = parser.parse_args()
    if reason := why_unavailable():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.basicConfig(**record.LOOK)
        vae = ours("Load", vae_name="bundled demo", dtype="fp32").args[0]
        ways: dict[str, Callable[[Tensor], Figures]] = {
            "plain": lambda source: handed_over(vae, source, 0),
            "corrected": lambda source: handed_over(vae, source, CORRECTIONS),
            "joined": lambda source: handed_over(vae, source, None),
        }
        for clip, source in clips().items():
            for way, run in ways.items():
                fields = summary(run(source))
                shown = {key: value for key, value in fields.items() if key != "series"}
                logging.info("%s, %s: %s", clip, way, shown)
                record.append(args.out, "bench_joins", clip, implementation=way, **fields)


if __name__ == "__main__":
    main()
