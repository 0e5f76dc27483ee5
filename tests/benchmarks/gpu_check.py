"""The part `check` of `bench_gpu.py`: the check of the device, as it is and with planted faults."""

import contextlib
import functools
import time

import torch

from fast_video_vae.tests.benchmarks.gpu_bench import NARROW, Bench, Cases, Values
from fast_video_vae.tests.faults import FAULTS, Planted
from fast_video_vae.vae.streaming.prepared import device_check


def check(bench: Bench) -> Cases:
    """Yield the check of the device in each dtype, and in float32 and bfloat16 with faults."""

    def run(dtype: torch.dtype, name: str = "") -> Values:
        planted = Planted(FAULTS[name]) if name else contextlib.nullcontext()
        start = time.perf_counter()
        with planted:
            rows = list(device_check.rows(bench.device, dtype))
            check_s = time.perf_counter() - start
            verdict = device_check.judged(rows, bench.device, dtype)
        worst = max(rows, key=lambda row: row.error / row.bound)
        return {
            "check s": check_s,
            "search s": time.perf_counter() - start - check_s,
            "wrong": sum(not row.is_right for row in rows),
            "worst": f"{worst.case.name} {worst.error:.1e} of {worst.bound:.0e}",
            "instead": " ".join(verdict.fallback.names),
            "expected": " ".join(FAULTS[name].instead) if name else "",
        }

    for dtype in (torch.float32, *NARROW):
        yield f"right in {dtype}", functools.partial(run, dtype)
    for name, fault in bench.pick([*FAULTS.items()], [*FAULTS.items()][:1]):
        yield name, functools.partial(run, fault.dtype, name)
