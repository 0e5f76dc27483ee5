"""Our VAE beside ComfyUI's and diffusers', on the same weights and the same input, in one run.

`python tests/benchmarks/bench_vae.py` runs every case in turn with every implementation, `--rounds`
times over, prints the median seconds and the median of the rounds' ratios, and appends one JSON row
per case and implementation to `results.jsonl`. Nothing else should run on the machine: it doubles
such times.
"""

import argparse
import gc
import logging
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.peers import (  # noqa: E402
    PeerUnavailableError,
    comfyui_vae,
    diffusers_vae,
)
from fast_video_vae.tests.builders import random_state_dict  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One measurement: a direction, a size and a number format."""

    direction: str
    frames: int
    height: int
    width: int
    dtype: torch.dtype

    @property
    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.direction} {self.frames}x{self.height}x{self.width} {name}"

    def input(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if self.direction == "encode":
            shape = (1, 3, self.frames, self.height, self.width)
            return (torch.rand(shape, generator=generator) * 2 - 1).to(device, self.dtype)
        shape = (1, 16, (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8)
        return torch.randn(shape, generator=generator).to(device, self.dtype)


_SIZES = {
    "cpu": [(1, 256, 256), (17, 192, 192)],
    "cuda": [(1, 1024, 1024), (81, 480, 832), (81, 720, 1280)],
}


def cases(device: torch.device, directions: list[str], dtypes: list[torch.dtype]) -> list[Case]:
    """Every case of a kind of device."""
    return [
        Case(direction, *size, dtype)
        for dtype in dtypes
        for size in _SIZES[device.type]
        for direction in directions
    ]


def implementations(
    state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[str, Run, Run]]:
    """Name to version, encode and decode; what cannot be built is left out and logged."""
    ours = load_vae(state, dtype=dtype, device=device)
    built: dict[str, tuple[str, Run, Run]] = {"ours": (record.commit(), ours.encode, ours.decode)}
    for build in (comfyui_vae, diffusers_vae):
        try:
            peer = build(state, dtype=dtype, device=device)
        except PeerUnavailableError as error:
            logging.warning("left out: %s", error)
            continue
        built[peer.name] = (peer.version, peer.encode, peer.decode)
    return built


def measure(case: Case, runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every implementation in every round, after one that does not count."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = case.input(device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for count in range(rounds + 1):
        for name, run in runs.items():
            gc.collect()
            _wait(device)
            start = time.perf_counter()
            result = run(x)
            _wait(device)
            if count:
                seconds[name].append(time.perf_counter() - start)
            del result
    return seconds


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=96, help="base width of the random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--direction", nargs="+", default=["decode", "encode"])
    parser.add_argument("--size", nargs="+", help="FRAMESxHEIGHTxWIDTH instead of the usual ones")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger().setLevel(logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.size:
        _SIZES[device.type] = [tuple(map(int, size.split("x"))) for size in args.size]
    state = random_state_dict(args.width)
    head = f"{'case':34}" + "".join(
        f"{name:>12}" for name in ("ours s", "comfyui s", "diffusers s")
    )
    logging.info("%s%12s%12s", head, "x comfyui", "x diffusers")
    for dtype in (getattr(torch, name) for name in args.dtype):
        built = implementations(state, dtype, device)
        for case in cases(device, args.direction, [dtype]):
            pick = 1 if case.direction == "encode" else 2
            with torch.inference_mode():
                seconds = measure(
                    case, {name: entry[pick] for name, entry in built.items()}, args.rounds
                )
            _report(case, seconds)
            for name, times in seconds.items():
                record.append(
                    args.out,
                    "bench_vae",
                    case.label,
                    base_width=args.width,
                    implementation=name,
                    version=built[name][0],
                    median_s=round(statistics.median(times), 4),
                    seconds=[round(value, 4) for value in times],
                    ours_is_faster_by=round(_ratio(seconds, name), 3),
                )
        del built
        gc.collect()


def _report(case: Case, seconds: dict[str, list[float]]) -> None:
    times = [
        f"{statistics.median(seconds[name]):12.3f}" if name in seconds else " " * 12
        for name in _ORDER
    ]
    ratios = [
        f"{_ratio(seconds, name):12.2f}" if name in seconds else " " * 12 for name in _ORDER[1:]
    ]
    logging.info("%s", f"{case.label:34}" + "".join(times + ratios))


_ORDER = ("ours", "comfyui", "diffusers")


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """How many times as long the other took: the median over the rounds, each a pair."""
    return statistics.median(
        theirs / ours for theirs, ours in zip(seconds[name], seconds["ours"], strict=True)
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
