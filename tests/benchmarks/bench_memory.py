"""Peak memory of the streams, above the loaded weights, for a short and a long video.

`python tests/benchmarks/bench_memory.py` measures each case in a process of its own and appends one
JSON row per case to `results.jsonl`.
"""

import argparse
import json
import logging
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name

import torch  # noqa: E402

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.builders import random_state_dict  # noqa: E402
from fast_video_vae.tests.seedvr2 import random_seedvr2  # noqa: E402
from fast_video_vae.tests.wan22 import random_wan22  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402


def resident_bytes() -> int:
    """Memory of this process that is in RAM (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def weights(family: str, width: int) -> dict[str, torch.Tensor]:
    """Random weights of a family for a base width."""
    if family == "wan2.1":
        return random_state_dict(width)
    if family == "seedvr2":
        return random_seedvr2((width, 2 * width, 4 * width, 4 * width))
    return random_wan22(width, width)


def measure(encode: bool, frames: int, side: int, width: int, family: str) -> dict[str, float]:
    """Run one stream and watch the process."""
    vae = load_vae(weights(family, width), dtype=torch.float32)
    channels, step = vae.config.latent_channels, vae.config.spatial_compression
    # Derived weights count as weights.
    list(vae.encode_stream(torch.zeros(1, 3, 5, 2 * step, 2 * step)))
    list(vae.decode_stream(torch.zeros(1, channels, 2, 2, 2)))
    before = peak = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    video = (torch.rand(1, 3, 1, side, side) * 2 - 1 for _ in range(frames))
    latent = torch.randn(1, channels, vae.config.latent_frames(frames), side // step, side // step)
    start = time.perf_counter()
    for _ in vae.encode_stream(video) if encode else vae.decode_stream(latent):
        pass
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "peak_mib": round((peak - before) / 2**20, 1),
        "estimate_mib": round(vae.memory_bytes(side, side, encode=encode) / 2**20, 1),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Run every case, or with `--case` the one that this process is for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=24, help="base width of the random weights")
    parser.add_argument("--family", choices=["wan2.1", "wan2.2", "seedvr2"], default="wan2.1")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--frames", type=int, nargs="+", default=[33, 129])
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--case", choices=["encode", "decode"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if args.case:
        result = measure(args.case == "encode", args.frames[0], args.side, args.width, args.family)
        logging.info(json.dumps(result))
        return
    for case in ("decode", "encode"):
        for frames in args.frames:
            arguments = ["--width", args.width, "--side", args.side, "--frames", frames]
            arguments += ["--family", args.family]
            command = [sys.executable, __file__, *map(str, arguments), "--case", case]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result = json.loads(output.splitlines()[-1])
            family = "" if args.family == "wan2.1" else f" {args.family}"
            label = f"{case} stream {frames}x{args.side}x{args.side} float32{family}"
            logging.info("%-36s %s", label, result)
            record.append(args.out, "bench_memory", label, base_width=args.width, **result)


if __name__ == "__main__":
    main()
