"""The part `hopper` of `bench_gpu.py`: what can be wrong first, then odd sizes, then seconds."""

import functools
import itertools
import math

import torch

from fast_video_vae.kernels.cuda_ops.hopper_tile import tile_of
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.benchmarks.gpu_bench import (
    CONVS,
    HOPPER,
    TERMS,
    WRONG,
    Bench,
    Call,
    Cases,
    Values,
    error_of,
    named,
    timed_case,
)
from fast_video_vae.tests.benchmarks.routed import routed

# The two ways of the kernel for Hopper by their names in rows.
WAYS = {"hopper 0": "hopper:0", "hopper 1": "hopper:1"}

# Input channels whose rows in shared memory have 128 and 64 bytes, and rows of taps. A descriptor
# of way 1 starts within the eight rows that are permuted together.
_STARTS = tuple((inputs, row) for inputs in (64, 96) for row in range(3))

# Each width of a tile, kernel, dtype and term, at sizes that leave parts of tiles; two have more
# tiles than a GPU has multiprocessors, so that a block does several.
_SUM, _ALL = "biases + residual", "biases + residual + norm"
_ODD = (
    ((96, 96, 3, 3, 3), (9, 98, 77), "bare"), ((96, 96, 3, 3, 3), (1, 1, 50), _ALL),
    ((192, 192, 3, 3, 3), (2, 35, 1), _ALL), ((160, 160, 3, 3, 3), (3, 16, 47), f"{_ALL} in fp16"),
    ((384, 384, 3, 3, 3), (4, 15, 16), _SUM), ((256, 256, 3, 3, 3), (5, 33, 18), "bias, no tail"),
    ((512, 512, 3, 3, 3), (1, 20, 40), f"{_SUM} in fp16"), ((640, 640, 1, 3, 3), (7, 9, 31), _SUM),
    ((1024, 1024, 1, 3, 3), (2, 31, 16), "bias + residual"), ((768, 384, 2, 2), (5, 30, 52), _SUM),
    ((384, 192, 2, 2), (1, 9, 7), "bare in fp16"), ((768, 384, 3, 1, 1), (6, 13, 17), "bias"),
)  # fmt: skip


def hopper(bench: Bench) -> Cases:
    """Yield what can be wrong in the kernel for Hopper alone, then odd sizes, then its seconds."""
    bench.case_s = bench.pick(20, math.inf)  # a barrier that never completes costs one case

    def starts(way: str, inputs: int, row: int) -> Values:
        """Return the error of one whole tile for each tap of a row as the only one."""
        errors: Values = {}
        for column in range(3):
            call = Call(bench, (96, inputs, 1, 3, 3), (1, 18, 18), "bare")
            call.options["padding"] = 0, 0
            alone = torch.zeros_like(call.taps)
            alone[..., row, column] = 1
            call.taps *= alone
            errors[f"kw {column}"] = error_of(call.run(way), call.exact())
        return errors

    def odd(way: str, taps: tuple[int, ...], size: tuple[int, ...], terms: str) -> Values:
        with routed(), torch.no_grad():
            call = Call(bench, taps, bench.pick(size, (2, 3, 5)), terms)
            result, exact = call.run(way), call.exact()
            return {"error": error_of(result, exact), "cudnn": error_of(call.run(None), exact)}

    for (name, way), (inputs, row) in itertools.product(WAYS.items(), _STARTS):
        if not _broken(bench, name):
            work = functools.partial(starts, way, inputs, row)
            yield f"{name}, 1x3x3 {inputs} to 96, one tile, only taps of kh {row}", work
    for name in WAYS:
        if why := _broken(bench, name, wrong=True):
            yield f"{name}, all other cases", lambda why=why: {"why": f"not run: {why}"}
    for name, (taps, size, terms) in itertools.product(WAYS, _ODD):
        if not _broken(bench, name, wrong=True):
            work = functools.partial(odd, WAYS[name], taps, size, terms)
            yield f"{name}, {named(taps, size, terms)}", work
    for (taps, size), terms in itertools.product(CONVS[:3], TERMS[:3]):
        ways = ways_of(bench, taps, terms)
        for name in ("cuDNN", *ways) if ways else ():
            way = WAYS.get(name)
            here = bench.pick(size, (1, 3, 5))
            yield timed_case(bench, taps, here, terms, name, way or "aten", way)


def _broken(bench: Bench, name: str, *, wrong: bool = False) -> str | None:
    """Return what the part `hopper` saw of a way: a crash, or if asked a `wrong` result."""
    for row in bench.rows:
        if row["part"] == "hopper" and name in row["case"]:
            why = row.get("why", "")
            if why and not why.startswith("Refusal"):
                return why
            errors = [row[key] for key in ("error", "apart", "kw 0", "kw 1", "kw 2") if key in row]
            if wrong and not all(error <= WRONG for error in errors):  # also NaN
                return f"{row['case']} has errors of {', '.join(map(str, errors))}"
    return None


def ways_of(bench: Bench, taps: tuple[int, ...], terms: str) -> list[str]:
    """Return the ways of the kernel for Hopper that serve a convolution, without wrong ones."""
    if bench.chip != HOPPER or "fp16" in terms:  # it sums in float32, as it does for bfloat16
        return []
    try:
        tile_of((1, *taps[2:])[-3:], *taps[1::-1], copies=True, norm="norm" in terms)
    except Refusal:
        return []
    return [name for name in WAYS if not _broken(bench, name, wrong=True)]
