"""Seconds of this pack's VAE, ComfyUI's and diffusers', on the same weights and input, in one run.

`python tests/benchmarks/bench_vae.py` runs every case with all implementations in turn for
`--rounds` rounds, prints the median seconds and the median of the rounds' ratios, and appends one
JSON row per case and implementation to `results.jsonl`. Run it on an idle machine: other processes
double the times.
"""

import argparse
import functools
import gc
import itertools
import logging
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import peers, record, timing  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_input, random_weights  # noqa: E402
from fast_video_vae.vae import VideoVAE, load_vae  # noqa: E402

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One measurement.

    Without a dtype each implementation uses its default: this pack the dtype that `load_vae`
    chooses, the peers float32 on a CPU.
    """

    direction: str
    frames: int
    height: int
    width: int
    dtype: torch.dtype | None
    family: str
    static: bool = False  # a picture, then grey, as ComfyUI's WanImageToVideo encodes them

    @property
    def label(self) -> str:
        name = "defaults" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        family = "" if self.family == "wan2.1" else f" {self.family}"
        static = ", static" if self.static else ""
        return f"{self.direction} {self.frames}x{self.height}x{self.width} {name}{family}{static}"

    def input(self, device: torch.device) -> Tensor:
        x = random_input(self.direction, self.family, self.frames, self.height, self.width)
        if self.static and self.direction == "encode":
            x[:, :, 1:] = 0
        return x.to(device, self.dtype or torch.float32)


_SIZES = {
    "wan2.1": {
        "cpu": [(1, 256, 256), (1, 512, 512), (17, 192, 192)],
        "cuda": [(1, 1024, 1024), (81, 480, 832), (81, 720, 1280)],
    },
    "wan2.2": {"cpu": [(17, 128, 128)], "cuda": [(1, 1024, 1024), (121, 704, 1280)]},
    "seedvr2": {"cpu": [(5, 128, 128)], "cuda": [(1, 1024, 1024), (33, 720, 1280)]},
}
_PEERS = {"comfyui": peers.comfyui_vae, "diffusers": peers.diffusers_vae}
_ORDER = ("ours", "every", *_PEERS)


def implementations(
    state: dict[str, Tensor], dtype: torch.dtype | None, device: torch.device, names: list[str]
) -> dict[str, tuple[str, Run, Run]]:
    """Return version, encode and decode by name; an unavailable peer is logged and left out."""
    ours = load_vae(state, dtype=dtype, device=device)
    built: dict[str, tuple[str, Run, Run]] = {"ours": (record.commit(), ours.encode, ours.decode)}
    if "every" in names:
        built["every"] = (record.commit(), functools.partial(every_frame, ours), ours.decode)
    for name in [name for name in _PEERS if name in names]:
        try:
            peer = _PEERS[name](state, dtype=dtype or torch.float32, device=device)
        except peers.PeerUnavailableError as error:
            logging.warning("left out: %s", error)
            continue
        built[peer.name] = (peer.version, peer.encode, peer.decode)
    return built


def every_frame(vae: VideoVAE, frames: Tensor) -> Tensor:
    """Encode `frames` `[B, C, T, H, W]` without skipping static frames."""
    vae.skips_static = False
    try:
        return vae.encode(frames)
    finally:
        vae.skips_static = True


def main() -> None:
    """Run the cases that the command line names."""
    args = _arguments()
    device = timing.best_device()
    sizes = _SIZES[args.family][device.type]
    if args.size:
        sizes = [tuple(map(int, size.split("x"))) for size in args.size]
    width = args.width or WIDTHS[args.family]
    state = random_weights(args.family, width)
    usual = [name for name in _ORDER[1:] if name in _PEERS or args.static]
    names = ["ours", *(usual if args.peers is None else args.peers)]
    columns = [f"{name} s" for name in names] + [f"x {name}" for name in names[1:]]
    logging.info("%s", f"{'case':34}" + "".join(f"{column:>12}" for column in columns))
    for dtype in (None if name == "default" else getattr(torch, name) for name in args.dtype):
        built = implementations(state, dtype, device, names)
        for size, direction in itertools.product(sizes, args.direction):
            case = Case(direction, *size, dtype, args.family, args.static)
            x, pick = case.input(device), 1 if case.direction == "encode" else 2
            runs = {name: functools.partial(entry[pick], x) for name, entry in built.items()}
            with torch.inference_mode():
                seconds = timing.in_turn(runs, args.rounds)
            seconds = {name: each[1:] for name, each in seconds.items()}
            medians, ratios = timing.append(
                args.out, "bench_vae", case.label, seconds, width,
                {name: entry[0] for name, entry in built.items()},
            )  # fmt: skip
            cells = [f"{medians[name]:12.3f}" if name in built else " " * 12 for name in names]
            cells += [f"{ratios[name]:12.2f}" if name in built else " " * 12 for name in names[1:]]
            logging.info("%s", f"{case.label:34}" + "".join(cells))
        del built
        gc.collect()


def _arguments() -> argparse.Namespace:
    parser = record.parser(__doc__)
    add, dtypes = parser.add_argument, ["bfloat16", "float32"]
    which = (
        "comfyui, diffusers (default: both), or every: this pack without skipping static frames "
        "(with --static added by default)"
    )
    add("--family", choices=_SIZES, default="wan2.1")
    add("--width", type=int, help="base width of the random weights")
    add("--rounds", type=int, default=3)
    add("--dtype", nargs="+", default=dtypes, help="or default: each implementation's own")
    add("--direction", nargs="+", default=["decode", "encode"])
    add("--size", nargs="+", help="FRAMESxHEIGHTxWIDTH instead of the default sizes")
    add("--static", action="store_true", help="encode a picture, then grey frames")
    add("--peers", nargs="*", choices=_ORDER[1:], help=which)
    return parser.parse_args()


if __name__ == "__main__":
    main()
