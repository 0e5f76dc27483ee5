"""The parts of `bench_gpu.py`: what is measured on a GPU, what decides most first."""

import contextlib
import functools
import importlib
import itertools
import logging
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fast_video_vae.kernels import use_backend
from fast_video_vae.kernels.backends import SIGNATURES
from fast_video_vae.kernels.modules import ask
from fast_video_vae.kernels.ready import sample_inputs
from fast_video_vae.kernels.triton_ops.convolution_tiles import ConvTile, tiles_of
from fast_video_vae.tests.benchmarks.gpu_bench import (
    CONVS,
    NARROW,
    SMALL_CONVS,
    SMALL_SIZE,
    TERMS,
    Bench,
    Call,
    Cases,
    Values,
    error_of,
    timed_case,
)
from fast_video_vae.tests.benchmarks.gpu_hopper import WAYS, hopper, ways_of
from fast_video_vae.tests.benchmarks.routed import routed
from fast_video_vae.tests.benchmarks.weights import random_input, random_weights
from fast_video_vae.tests.faults import FAULTS, Planted
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.streaming import resume
from fast_video_vae.vae.streaming.prepared import device_check

_ROOT = Path(__file__).resolve().parents[2]

_CLIPS = (
    ("decode", 81, 720, 1280), ("decode", 81, 480, 832), ("encode", 81, 480, 832),
    ("encode", 81, 720, 1280), ("decode", 1, 2160, 3840),
)  # fmt: skip
_SMALL_CLIPS = (("encode", 5, 16, 16), ("decode", 5, 16, 16))


def limits(bench: Bench) -> Cases:
    """Yield what nothing exceeds: a copy, and products."""
    x, size = bench.normal(bench.pick(1 << 29, 1 << 20)), bench.pick(8192, 128)
    yield "copy", lambda: {"GB/s": 4e-6 * x.nbytes / bench.ms(lambda: [x.clone(), x.clone()])}
    for dtype in (*NARROW, torch.float32):
        a = bench.normal(size, size, dtype=dtype)
        rate = functools.partial(lambda a: 2e-9 * size**3 / bench.ms(lambda: a @ a), a)
        yield f"product in {dtype}", lambda rate=rate: {"TFLOP/s": rate()}


def attention(bench: Bench) -> Cases:
    """Yield each implementation of one head of 384 over the pixels of 480p, 720p and 4K."""
    module = importlib.import_module("fast_video_vae.kernels.reference.attention")
    ways = {"cuda": functools.partial(ask, "cuda", "attention")}

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[
            :, 0
        ]

    ways |= {"blocks": module.in_blocks, "fused": fused}

    def run(name: str, tokens: int, dtype: torch.dtype) -> Values:
        q, k, v = bench.normal(1, tokens, 3 * 384, dtype=dtype).chunk(3, dim=-1)
        route = "cuda" if name == "cuda" else "reference"
        with use_backend(route), torch.no_grad():
            result, ms = ways[name](q, k, v)[:, :64], bench.ms(lambda: ways[name](q, k, v))
        weights = (q[:, :64].double() @ k.double().mT / 384**0.5).softmax(-1)
        error, rate = error_of(result, weights @ v.double()), 4e-9 * tokens**2 * 384 / ms
        return {"ms": ms, "TFLOP/s": rate, "error": error, "route": route}

    sizes = bench.pick((4096, 14400, 129600), (32,))
    for tokens, dtype, name in itertools.product(sizes, NARROW, ways):
        if tokens < 1 << 16 or name != "fused":
            work = functools.partial(run, name, tokens, dtype)
            yield f"{tokens} tokens in {dtype}: {name}", work


def _tiles(bench: Bench, taps: tuple[int, ...], terms: str) -> list[tuple[str, ConvTile]]:
    """Return the fields and tiles of a convolution; in fp16 those that sum in it."""
    tiles = [*tiles_of(bench.chip, NARROW["fp16" in terms], taps[0])]
    tiles = [each for each in tiles if each.half] if "fp16" in terms else tiles
    names = (
        f"{each.pixels}x{'+'.join(str(n) for n in each.outputs if n)} k{each.depth} w{each.warps} "
        f"s{each.stages}"
        for each in tiles
    )
    return [*zip(names, tiles, strict=True)]


def compilation(bench: Bench) -> Cases:
    """Yield one case: the kernels of all tiles, compiled in ten threads."""

    @torch.no_grad()
    def compiled(taps: tuple[int, ...], terms: str, name: str, tile: ConvTile) -> str:
        if time.time() > bench.until:
            return "left"
        try:
            Call(bench, taps, bench.pick(*SMALL_SIZE), terms).run(tile)
        except Exception as error:  # whatever the compiler raises
            return f"{taps} {terms}, {name}: {bench.reason(error)}"
        return ""

    def run() -> Values:
        convs = itertools.product(bench.pick(CONVS, SMALL_CONVS), TERMS)
        works = [(c[0], terms, *tile) for c, terms in convs for tile in _tiles(bench, c[0], terms)]
        # Triton's interpreter has one state for all threads.
        with routed(), ThreadPoolExecutor(10 if bench.cuda else 1) as pool:
            results = [*pool.map(compiled, *zip(*dict.fromkeys(works), strict=True))]
        bad = [each for each in results if each not in ("", "left")]
        found = {"tiles": len(results), "left": results.count("left"), "bad": len(bad)}
        return found | {"first bad": "; ".join(bad[:3]) or None}

    yield "each tile and kind of terms", run


def convolutions(bench: Bench) -> Cases:
    """Yield the library, its search, and ours; with terms only those that are fast without."""
    for (taps, size), terms in itertools.product(bench.pick(CONVS, SMALL_CONVS), TERMS):
        like = {"taps": taps, "size": size, "terms": "bare"}
        bare = [row for row in bench.found("convolutions") if like.items() <= row.items()]
        good = 1.3 * min((row["ms"] for row in bare), default=0.0)
        fast = {row["by"] for row in bare if row["ms"] <= good}
        # A pass adds the terms to the library's result, so its search is that without terms.
        ways = [("cuDNN", "aten", None), ("cuDNN search", None, None)][: 1 + (terms == "bare")]
        ways += [(name, WAYS[name], WAYS[name]) for name in ways_of(bench, taps, terms)]
        for number, (name, tile) in enumerate(_tiles(bench, taps, terms)):
            ways.append((name, f"triton:{number}", tile))
        for name, route, way in ways:
            if name in fast or terms.startswith("bare"):
                yield timed_case(bench, taps, size, terms, name, route, way)


def ops(bench: Bench) -> Cases:
    """Yield each op between convolutions on each backend, on tensors larger than any cache."""

    def run(op: str, channels: int, backend: str) -> Values:
        side = bench.pick(math.isqrt((1 << 25) // channels) // 16 * 16, 16)  # 256 MiB
        options = (4, side, side), torch.bfloat16, bench.device
        if op == "rms_norm_silu":
            rows, tail = sample_inputs.row(channels), sample_inputs.video(channels, 2)
            given = {"x": sample_inputs.video(channels), "gamma": rows, "tail": tail}
            options += ({**given, "silu": True, "border": 0},)
        make = functools.partial(sample_inputs.call, op, *options)
        with use_backend(backend), torch.no_grad():
            expected, given = ask("reference", op, *make()), make()
            apart = error_of(ask(backend, op, *make()), expected.double())
            ms = bench.ms(lambda: ask(backend, op, *given))
        named = dict(zip(SIGNATURES[op], given, strict=True))
        rate = 1e-6 * _moved_bytes(named, expected) / ms
        copy = next((row["GB/s"] for row in bench.found("limits") if "GB/s" in row), math.inf)
        more = {"% of copy": 100 * rate / copy, "apart": apart, "op": op, "route": backend}
        return {"ms": ms, "GB/s": rate, **more}

    widths = {"pixel_shuffle_3d": 12, "frames_to_images": 12}
    calls = [(op, widths.get(op, 96)) for op in sample_inputs.OPS if op != "attention"]
    calls += bench.pick([("rms_norm_silu", 192), ("rms_norm_silu", 384)], [])
    for (op, channels), backend in itertools.product(calls, ("triton", "cuda")):
        yield f"{op} {channels}: {backend}", functools.partial(run, op, channels, backend)


def clips(*ways: str, only: int | None = None) -> Callable[[Bench], Cases]:
    """Return the part of the five clips, or of one, decoded or encoded in some ways in turn."""

    def run(bench: Bench, way: str, clip: tuple[str, int, int, int]) -> Values:
        vae = bench.vae(way if way in ("comfyui", "diffusers") else "ours")
        direction, frames, height, width = clip
        shape = (1, 16, frames // 4 + 1, height // 8, width // 8)
        x = bench.normal(*shape if direction == "decode" else (1, 3, *clip[1:])).clamp_(-1, 1)
        call_vae = functools.partial(getattr(vae, direction), x, *([1] if "graphs" in way else []))
        with contextlib.ExitStack() as modes, torch.inference_mode():
            if way == "library alone":
                modes.enter_context(use_backend("aten"))
            elif way not in ("ours", "comfyui", "diffusers"):
                modes.enter_context(routed(bench.found("attention", "ops", "convolutions")))
                modes.enter_context(mock.patch.object(vae, "graphs", way == "with graphs"))
            values = _timed(bench, call_vae)
        if hasattr(vae, "plan"):
            plan = vae.plan(height, width, encode=direction == "encode", single_frame=frames == 1)
            values["planned_gib"] = plan.peak_bytes / 2**30
        return {"implementation": way, **values}

    def cases(bench: Bench) -> Cases:
        chosen = bench.pick(_CLIPS, _SMALL_CLIPS)
        for clip, way in itertools.product(chosen if only is None else [chosen[only]], ways):
            case = "Wan2.1 {0} {2}x{3}x{1}, bf16: ".format(*clip)
            yield case + way, functools.partial(run, bench, way, clip)

    return cases


def memory(bench: Bench) -> Cases:
    """Yield a decode in parts of the memory, of which its plan does not know: it restarts."""
    frames, height, width = bench.pick((81, 720, 1280), (5, 32, 48))
    x = bench.normal(1, 16, frames // 4 + 1, height // 8, width // 8)
    logger, lines = logging.getLogger(resume.__name__), list[str]()
    expected = functools.cache(lambda: bench.vae().decode(x).cpu())
    share = torch.cuda.set_per_process_memory_fraction if bench.cuda else lambda _: None

    def run(gib: int) -> Values:
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        level, whole = logger.level, expected()
        lines.clear()
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
        try:
            if bench.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                share(min(1.0, gib * 2**30 / torch.cuda.mem_get_info()[1]))
            start = time.perf_counter()
            result = bench.vae().decode(x).cpu()
            values = {"s": time.perf_counter() - start, "restarts": len(lines)}
        finally:
            share(1.0)
            logger.setLevel(level)
            logger.removeHandler(handler)
        peak = torch.cuda.max_memory_allocated() / 2**30 if bench.cuda else None
        last = lines[-1].partition("with ")[2] if lines else None
        return {**values, "error": error_of(result, whole), "peak_gib": peak, "last": last}

    for gib in bench.pick((40, 24, 16, 12, 8, 5), (5,)):
        yield f"decode in {gib} GiB", functools.partial(run, gib)


def float32(bench: Bench) -> Cases:
    """Yield the largest error of float32 on this device against float64 on a CPU, all families."""

    def run(family: str, direction: str, frames: int) -> Values:
        weights = random_weights(family, bench.pick(32, 8))
        x = random_input(direction, family, frames, 32, 32)
        one = load_vae(weights, dtype=torch.float32, device=bench.device)
        vaes = (one, load_vae(weights, dtype=torch.float64, device="cpu"))
        run, exact = (getattr(vae, direction)(x.to(vae.device, vae.dtype)).cpu() for vae in vaes)
        return {"error": float((run - exact).abs().max() / exact.abs().max())}

    families = bench.pick(("wan2.1", "wan2.2", "seedvr2"), ("wan2.1",))
    for work in itertools.product(families, ("decode", "encode"), bench.pick((1, 9), (1,))):
        yield "{} {}, frames: {}".format(*work), functools.partial(run, *work)


def tests(bench: Bench) -> Cases:
    """Yield the tests that need a GPU."""

    def run() -> Values:
        options = "-q -W default -p no:cacheprovider -o addopts=--import-mode=importlib "
        options += bench.pick("tests -m gpu -n 8", "tests/lora/test_texts.py")
        lines = _output([sys.executable, "-m", "pytest", *options.split()])
        failed = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
        result = [line for line in lines if re.search(r"\d (passed|failed|error|deselected)", line)]
        return {"result": [*lines, *result][-1], "failing": "; ".join(failed[:9]) or None}

    yield "pytest -m gpu", run


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

    for dtype in bench.pick((torch.float32, *NARROW), (torch.float32,)):
        yield f"right in {dtype}", functools.partial(run, dtype)
    for name, fault in bench.pick([*FAULTS.items()], [*FAULTS.items()][:1]):
        yield name, functools.partial(run, fault.dtype, name)


def _moved_bytes(arguments: Values, result: Tensor) -> int:
    """Return the bytes that a call must move: each argument read once, the result written once."""
    # A tail is read and written. The second read of `x` for the statistics of a norm over frames is
    # not counted.
    tail = arguments.get("tail")
    tensors = [x for name, x in arguments.items() if name != "out" and isinstance(x, Tensor)]
    return sum(x.nbytes for x in (*tensors, result, *([] if tail is None else [tail])))


def _timed(bench: Bench, call: Callable[[], Any]) -> Values:
    """Return the seconds of three runs, and what those of the third were."""
    first, second = bench.seconds(call), bench.seconds(call)
    cpu, kind = ProfilerActivity.CPU, ProfilerActivity.CUDA if bench.cuda else ProfilerActivity.CPU
    memory = torch.cuda.memory_stats if bench.cuda else dict
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for kinds in ({kind}, {cpu, kind}):  # recorded ops slow the launches down, so they come second
        old = memory()
        with profile(activities=kinds) as profiler:
            seconds = bench.seconds(call)
        new, held = memory(), old.get("allocated_bytes.all.current", 0)
        spans = [e.time_range for e in profiler.events() if e.device_type.name == kind.name]
        if spans:
            break
    busy = gap = 0.0
    end = start = min((each.start for each in spans), default=0.0)
    for each in sorted(spans, key=lambda each: each.start):
        gap, busy = max(gap, each.start - end), busy + max(0.0, each.end - max(end, each.start))
        end = max(end, each.end)
    return {
        "s": seconds, "first_s": first, "second_s": second, "busy_s": busy / 1e6,
        "preparation_s": seconds - (end - start) / 1e6, "idle_s": (end - start - busy) / 1e6,
        "gap_ms": gap / 1e3, "launches": len(spans),
        "mallocs": new.get("num_device_alloc", 0) - old.get("num_device_alloc", 0),
        "peak_gib": (new.get("allocated_bytes.all.peak", 0) - held) / 2**30,
    }  # fmt: skip


def _output(command: list[str]) -> list[str]:  # at least one line
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() or [f"status {done.returncode}"]


# By name: seconds, by the rows of an H200, cases, and what the rows say.
PARTS = {
    "limits": (8, limits, "a copy and products"),
    "hopper": (40, hopper, "kw: one tap alone; cudnn: its error in the same dtype"),
    "first": (25, clips("ours", only=1), "a new user's decode, nothing compiled"),
    "compilation": (22, compilation, "of all tiles, in ten threads"),
    "attention": (15, attention, "one head of 384 channels; error against float64"),
    "convolutions": (55, convolutions, "error: from float64, small; apart: from the library"),
    "ops": (20, ops, "the passes between convolutions; apart: from PyTorch's result"),
    "cases": (102, clips("ours", "library alone", "best per layer"), "whole clips"),
    "comfyui": (40, clips("comfyui"), "the same clips"),
    "graphs": (10, clips("without graphs", "with graphs", only=1), "CUDA graphs"),
    "memory": (18, memory, "720 x 1280 x 81 with less memory than the plan knows of"),
    "float32": (18, float32, "all families, against float64 on a CPU"),
    "check": (12, check, "of the device; --patience 6 has time for all planted faults"),
    "tests": (33, tests, "pytest -m gpu"),
    "peers": (50, clips("diffusers"), "the same clips"),
}
