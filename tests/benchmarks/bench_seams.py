"""Errors of a tiled decode: ComfyUI's `VAEDecodeTiled` with its own VAE and with this pack's.

`python tests/benchmarks/bench_seams.py` decodes a slowly moving smooth gradient, encoded by the
bundled VAE, with and without tiles in this process. It reports the difference in 8-bit levels, and
the largest step of brightness between two frames. Rows are appended to `results.jsonl`;
`--picture media/seams.jpg` draws the first setting (matplotlib).
"""

import logging
import runpy
import sys
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record, seams  # noqa: E402
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable  # noqa: E402

Decoded = dict[str, tuple[torch.Tensor, torch.Tensor]]

_SETTINGS = {
    # The smallest tiles that the node allows, for little memory.
    "smallest": seams.Setting(33, 256, 256, 64, 64, 8, 4),
    "middle": seams.Setting(33, 256, 256, 128, 32, 16, 8),
    # The node's defaults, on a clip of more than one tile in width and time.
    "defaults": seams.Setting(73, 160, 640, 512, 64, 64, 8),
}
_TITLES = {"comfyui": "ComfyUI's VAE", "ours": "Fast Video VAE"}
_AMPLIFIED = 2


def main() -> None:
    """Run the settings that the command line names."""
    parser = record.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=_SETTINGS, default=[*_SETTINGS])
    parser.add_argument("--picture", type=Path, help="draw the first setting into this file")
    args = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
        for count, name in enumerate(args.only):
            setting = _SETTINGS[name]
            decoded = seams.decoded(setting, Path(folder))
            _report(setting, decoded, args.out)
            if args.picture and not count:
                _draw(setting, decoded, args.picture)


def _report(setting: seams.Setting, decoded: Decoded, out: Path) -> None:
    from comfyui_version import __version__ as version

    errors = {name: seams.error(*images) for name, images in decoded.items()}
    apart = 255 * (decoded["ours"][0] - decoded["comfyui"][0]).abs().max().item()
    logging.info("%s; without tiles the two are %.4f levels apart", setting, apart)
    for name, error in errors.items():
        values = {key: value if value is None else round(value, 6) for key, value in error.items()}
        logging.info("  %-9s%s", name, values)
        record.append(
            out,
            "bench_seams",
            str(setting),
            implementation=name,
            version=record.commit() if name == "ours" else version,
            untiled_apart_levels=round(apart, 6),
            **values,
        )


def _draw(setting: seams.Setting, decoded: Decoded, path: Path) -> None:
    """Draw one frame of each VAE, the difference below it, and the brightness of all frames."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    whole = decoded["ours"][0]
    wrong = (decoded["comfyui"][1] - decoded["comfyui"][0]).abs().mean(dim=(1, 2, 3))
    frame = int(wrong.argmax())
    columns = [
        (f"VAEDecodeTiled, {_TITLES[name]}", decoded[name][1], decoded[name][0])
        for name in ("comfyui", "ours")
    ]
    columns.append(("VAEDecode: no tiles", whole, decoded["comfyui"][0]))
    figure = plt.figure(figsize=(10, 9.2), layout="constrained", facecolor="white")
    rows = figure.subfigures(2, 1, height_ratios=[2.9, 1])
    axes = rows[0].subplots(2, 3)
    for (upper, lower), (title, images, others) in zip(axes.T, columns, strict=True):
        difference = (images[frame] - others[frame]) * _AMPLIFIED + 0.5
        worst = 255 * (images - others).abs().max().item()
        upper.imshow(images[frame].clamp(0, 1).numpy())
        upper.set_title(title, fontsize=11, weight="bold")
        lower.imshow(difference.clamp(0, 1).numpy())
        other = _TITLES["comfyui"] if images is whole else "no tiles"
        lower.set_xlabel(
            f"difference from {other}, x {_AMPLIFIED}:\nat most {worst:.2g} of 255 levels"
        )
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    rows[0].suptitle(f"Frame {frame} of a slow gradient: {setting}\n", fontsize=10, color="0.35")
    _draw_brightness(rows[1].subplots(), decoded)
    figure.savefig(path, dpi=100, pil_kwargs={"quality": 90, "optimize": True})
    plt.close(figure)
    logging.info("%s: %d bytes", path, path.stat().st_size)


def _draw_brightness(axis: "object", decoded: Decoded) -> None:
    lines = [
        ("comfyui", 1, "#d1495b", "-", f"tiles, {_TITLES['comfyui']}"),
        ("ours", 1, "#00798c", "-", f"tiles, {_TITLES['ours']}"),
        ("ours", 0, "black", ":", "no tiles"),
    ]
    for name, tiled, colour, style, label in lines:
        mean = 255 * decoded[name][tiled].mean(dim=(1, 2, 3))
        width = 4 if (name, tiled) == ("ours", 1) else 1.6
        axis.plot(mean.numpy(), style, color=colour, label=label, linewidth=width)
    axis.set_xlabel("frame")
    axis.set_ylabel("mean brightness, of 255")
    axis.margins(x=0.01)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    main()
