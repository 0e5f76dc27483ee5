"""The moving picture of `bench_seams.py`: tiled decodes of one latent by both VAEs, as decoded.

Below the frames is their mean brightness, over which a line moves with the frame. The ground is
solid and dark, so that the picture looks the same on a light and on a dark page.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from fast_video_vae.tests.benchmarks import seams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_TITLES = {"comfyui": "ComfyUI's VAE", "ours": "Fast Video VAE"}
_COLORS = {"comfyui": "#ff9277", "ours": "#4fd1a5"}
_GROUND, _TEXT, _SOFT, _GRID = "#14171c", "#f2f4f7", "#a9b1bd", "#2d343e"

# In pixels; README.md is about 900 wide. Places are from the left and the top.
_SIZE = (960, 784)
_DPI = 100
_EDGE, _SIDE = 24, 448  # around the frames, and of a frame, which is enlarged
_TITLE, _FRAMES, _ERROR, _PLOT, _NOTE = 38, 56, 530, 558, 762
_PLOT_LEFT, _PLOT_HEIGHT = 70, 144

_FRAME_MS = 120  # about 8 frames per second
_QUALITY = 85


def save(setting: seams.Setting, decoded: seams.Decoded, version: str, path: Path) -> int:
    """Write an animated WebP that repeats; it starts with the worst frame, for viewers of one.

    Args:
        setting: The setting of `decoded`.
        decoded: IMAGEs `[T, H, W, 3]` of `VAEDecode` and `VAEDecodeTiled` for `comfyui` and `ours`.
        version: ComfyUI's.
        path: The file.

    Returns:
        Its number of bytes.
    """
    whole, tiled = decoded["comfyui"]
    worst = int((tiled - whole).abs().mean(dim=(1, 2, 3)).argmax())
    order = [*range(worst, len(whole)), *range(worst)]
    first, *others = _pictures(setting, decoded, version, order)
    options = {"save_all": True, "append_images": others, "duration": _FRAME_MS, "loop": 0}
    # Every frame is whole: with kmax above 1, blocks that change little keep their old colors.
    first.save(path, "WEBP", quality=_QUALITY, method=6, kmin=0, kmax=1, **options)
    return path.stat().st_size


def _pictures(
    setting: seams.Setting, decoded: seams.Decoded, version: str, order: list[int]
) -> Iterator[Image.Image]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = [side / _DPI for side in _SIZE]
    figure = plt.figure(figsize=size, dpi=_DPI, facecolor=_GROUND)
    lefts = {"comfyui": _EDGE, "ours": _SIZE[0] - _EDGE - _SIDE}
    panels = {name: _panel(figure, left, name, decoded[name]) for name, left in lefts.items()}
    mark = _brightness(figure, decoded)
    note = f"Both from one latent, {setting}; bundled VAE, fp32, ComfyUI {version}; not amplified"
    _write(figure, _SIZE[0] / 2, _NOTE, note, color=_SOFT, fontsize=8.5, ha="center")
    for frame in order:
        for name, panel in panels.items():
            panel.set_data(_bytes(decoded[name][1][frame]))
        mark.set_xdata([frame, frame])
        figure.canvas.draw()
        yield Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())
    plt.close(figure)


def _panel(
    figure: "Figure", left: int, name: str, images: tuple[torch.Tensor, torch.Tensor]
) -> "object":
    """Add the frames of a VAE with its title and its largest error; return what shows a frame."""
    whole, tiled = images
    axis = _axes(figure, left, _FRAMES, _SIDE, _SIDE)
    axis.set_axis_off()
    color = _COLORS[name]
    _write(figure, left, _TITLE, _TITLES[name], color=color, fontsize=15, weight="bold")
    right = left + _SIDE
    _write(figure, right, _TITLE, "VAE Decode (Tiled)", color=_SOFT, fontsize=11, ha="right")
    worst = 255 * (tiled - whole).abs().max().item()
    text = f"{worst:.2g} of 255 levels"
    text = f"at most {text} from no tiles" if worst else f"{text} from no tiles"
    _write(figure, left + _SIDE / 2, _ERROR, text, color=color, fontsize=12, ha="center")
    return axis.imshow(_bytes(tiled[0]), interpolation="bicubic", aspect="auto")


def _brightness(figure: "Figure", decoded: seams.Decoded) -> "Line2D":
    """Add the brightness of all frames, and return the line that marks one."""
    axis = _axes(figure, _PLOT_LEFT, _PLOT, _SIZE[0] - _PLOT_LEFT - _EDGE, _PLOT_HEIGHT)
    curves = [
        ("comfyui", 1, _COLORS["comfyui"], "-", 2, f"tiles, {_TITLES['comfyui']}"),
        ("ours", 1, _COLORS["ours"], "-", 4, f"tiles, {_TITLES['ours']}"),
        ("ours", 0, _TEXT, ":", 1.5, "no tiles"),
    ]
    for name, tiled, color, style, width, label in curves:
        mean = 255 * decoded[name][tiled].mean(dim=(1, 2, 3))
        axis.plot(mean.numpy(), style, color=color, label=label, linewidth=width)
    axis.set_facecolor(_GROUND)
    axis.set_xlabel("frame", color=_SOFT)
    axis.set_ylabel("mean brightness", color=_SOFT)
    axis.tick_params(colors=_SOFT, length=0)
    axis.margins(x=0.01, y=0.08)
    axis.grid(color=_GRID)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)
    axis.legend(loc="upper right", frameon=False, labelcolor=_TEXT, fontsize=9.5)
    return axis.axvline(0, color=_TEXT, linewidth=1.5)


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    across, down = _SIZE
    return figure.add_axes(
        (left / across, 1 - (top + height) / down, width / across, height / down)
    )


def _write(figure: "Figure", left: float, baseline: float, text: str, **style: object) -> None:
    figure.text(left / _SIZE[0], 1 - baseline / _SIZE[1], text, va="baseline", **style)


def _bytes(image: torch.Tensor) -> np.ndarray:
    """Return an image `[H, W, 3]` in 8 bits."""
    return (255 * image.clamp(0, 1)).round().byte().numpy()
