"""Peak memory of the streams above the loaded weights, and the estimates of their plans.

`python tests/benchmarks/bench_memory.py` measures each case in a separate process and appends one
JSON row per case to `results.jsonl`. Linux only: it reads the peak of a process from `/proc`.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
runpy.run_path(str(_CONFTEST))  # binds the checkout to its import name

import torch  # noqa: E402

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.weights import WIDTHS, random_weights  # noqa: E402
from fast_video_vae.vae import StreamOptions, VideoVAE, load_vae  # noqa: E402
from fast_video_vae.vae.planning import plan  # noqa: E402
from fast_video_vae.vae.planning.job import job_of  # noqa: E402
from fast_video_vae.vae.planning.plan import Plan  # noqa: E402
from fast_video_vae.vae.streaming.precision import compute_dtype  # noqa: E402

_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Case:
    """One stream; the plan chooses chunk, tile, cut and limit where they are None."""

    family: str = "wan2.1"  # or "wan2.2", "seedvr2"
    encode: bool = False
    width: int = 24  # base width of the random weights
    latents: int = 3  # 1: a single frame
    size: tuple[int, int] = (256, 256)  # height and width of the frames
    batch: int = 1
    chunk: int | None = None  # latents per step
    tile: tuple[int, int] | None = None  # height and width
    cut: int | None = None  # index into the layers at which tiles can be cut
    limit_bytes: int | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        height, width = self.size
        words = [self.family, "encode" if self.encode else "decode", f"width {self.width}"]
        words += [f"{self.batch} x {self.latents} latents of {width}x{height} {self.dtype}"]
        if self.chunk:
            words.append(f"chunk {self.chunk}")
        if self.tile:
            words.append(f"tile {self.tile[1]}x{self.tile[0]} at cut {self.cut}")
        if self.limit_bytes:
            words.append(f"limit {self.limit_bytes >> 20} MiB")
        return ", ".join(words)


def run(*cases: Case) -> list[dict[str, float]]:
    """Measure `cases` one after the other in a new process, which keeps no freed memory."""
    command = [sys.executable, __file__, "--cases", json.dumps([asdict(case) for case in cases])]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case) -> dict[str, float]:
    """Run the stream of `case` in this process and return its peak, estimate and seconds."""
    dtype = getattr(torch, case.dtype)
    vae = load_vae(
        random_weights(case.family, case.width, case.width), dtype=dtype, encode_dtype=dtype
    )
    # The first stream loads libraries, starts threads and derives weights.
    stream(vae, replace(case, size=(64, 64), batch=1, tile=None, limit_bytes=None))
    given = input_of(vae, case)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    weights, before = vae.weight_bytes(), record.process_mib("VmRSS")
    _RESET.write_text("5", encoding="ascii")
    start = time.perf_counter()
    with cut_at(case.cut):
        stream(vae, case, given)
        seconds = time.perf_counter() - start
        derived = (vae.weight_bytes() - weights) / 2**20
        taken = record.process_mib("VmHWM") - before - derived
        estimate = planned(vae, case).peak_bytes
    return {
        "peak_mib": round(taken, 1),
        "estimate_mib": round(estimate / 2**20, 1),
        "seconds": round(seconds, 2),
    }


def stream(vae: VideoVAE, case: Case, given: torch.Tensor | None = None) -> None:
    """Run the stream of a case and drop its output at once."""
    run_stream = vae.encode_stream if case.encode else vae.decode_stream
    given = input_of(vae, case) if given is None else given
    options = StreamOptions(case.chunk, limit_bytes=case.limit_bytes, tile=case.tile)
    for _ in run_stream(given, options):
        pass


def input_of(vae: VideoVAE, case: Case) -> torch.Tensor:
    """Return the input of the stream of `case`: frames or a latent, `[B, C, T, H, W]`."""
    height, width = case.size
    config, step = vae.config, vae.config.spatial_compression
    if case.encode:
        x = torch.rand(case.batch, 3, config.frames(case.latents), height, width)
    else:
        shape = case.batch, config.latent_channels, case.latents, height // step, width // step
        x = torch.randn(shape)
    return x.to(vae.device, vae.dtype)


def planned(vae: VideoVAE, case: Case) -> Plan:
    """Return the plan of the stream of `case`."""
    config, step = vae.config, vae.config.spatial_compression
    size = case.batch, case.size[0] // step, case.size[1] // step
    network = vae.encoder if case.encode else vae.decoder
    assert network is not None
    dtype = compute_dtype(vae.dtype, vae.device)
    job = job_of(network, config, size, dtype, vae.device, single_frame=case.latents == 1)
    return plan.make_plan(job, case.limit_bytes, chunk=case.chunk, tile=case.tile)


@contextmanager
def cut_at(index: int | None) -> Iterator[None]:
    """Allow tiles to be cut at one layer only, the `index`-th; None: at all of them."""
    find = plan.can_cut
    if index is not None:
        plan.can_cut = lambda network: find(network)[index : index + 1]
    try:
        yield
    finally:
        plan.can_cut = find


def main() -> None:
    """Run every case, or those of `--cases` in this process."""
    parser = record.parser(__doc__, width=24, side=256, latents=[1, 9, 33], dtype="float32")
    parser.add_argument("--family", choices=WIDTHS, default="wan2.1")
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cases is not None:
        logging.info(json.dumps([measure(Case(**case)) for case in args.cases]))
        return
    for encode in (False, True):
        for latents in args.latents:
            size = args.side, args.side
            case = Case(args.family, encode, args.width, latents, size, dtype=args.dtype)
            (result,) = run(case)
            logging.info("%-76s %s", case, result)
            record.append(args.out, "bench_memory", str(case), base_width=args.width, **result)


if __name__ == "__main__":
    main()
