"""Errors of a tiled decode: ComfyUI's `VAEDecodeTiled` with its own VAE and with this pack's.

`python tests/benchmarks/bench_seams.py` decodes a slowly moving smooth gradient, encoded by the
bundled VAE, with and without tiles in this process. It reports the difference in 8-bit levels, and
the largest step of brightness between two frames. Rows are appended to `results.jsonl`.
"""

import logging
import runpy
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record, seams  # noqa: E402
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable  # noqa: E402

_SETTINGS = {
    # The smallest tiles that the node allows, for little memory.
    "smallest": seams.Setting(33, 256, 256, 64, 64, 8, 4),
    "middle": seams.Setting(33, 256, 256, 128, 32, 16, 8),
    # The node's defaults, on a clip of more than one tile in width and time.
    "defaults": seams.Setting(73, 160, 640, 512, 64, 64, 8),
}


def main() -> None:
    """Run the settings that the command line names."""
    parser = record.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=_SETTINGS, default=[*_SETTINGS])
    args = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
        for name in args.only:
            _report(_SETTINGS[name], seams.decoded(_SETTINGS[name], Path(folder)), args.out)


def _report(setting: seams.Setting, decoded: seams.Decoded, out: Path) -> None:
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
            version=record.commit() if name == "ours" else _version(),
            untiled_apart_levels=round(apart, 6),
            **values,
        )


def _version() -> str:
    """Return ComfyUI's version, whose modules are importable after `import_comfyui`."""
    from comfyui_version import __version__

    return __version__


if __name__ == "__main__":
    main()
