"""Section `profile`: where the time of a decode and of an encode goes, from `torch.profiler`.

On a GPU the spans are kernels and copies, and the idle share is the part of the unprofiled seconds
in which none of them runs. On a CPU they are PyTorch's ops.
"""

import functools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from fast_video_vae import kernels
from fast_video_vae.kernels import synchronize

from .rows import Case, Missing, Results, Values
from .session import Session
from .vae import Clip

_OWN, _OTHER = "this pack's kernels", "others"

# Groups by what a name contains, in this order; cuDNN's layout conversions are named after it too.
_GROUPS = {
    "layout conversions": r"nchwToNhwc|nhwcToNchw|nchw_to_nhwc|nhwc_to_nchw|[Tt]ransformTensor"
    r"|convertTensor|nchw2nhwc|nhwc2nchw|reorder",
    "copies between host and device": r"Memcpy (?:HtoD|DtoH)",
    "copies on the device": r"Memcpy|Memset|aten::(?:copy_|fill_|zero_|cat)|direct_copy|CatArray",
    "convolutions": r"[Cc]onv(?!ert)|fprop|implicit_gemm|winograd|cudnn",
    "products and attention": r"gemm|nvjet|cutlass|flash|fmha|attention|[a-z]mm\b|matmul|gemv",
}
GROUPS = (_OWN, *_GROUPS, _OTHER)

_TOP = tuple(f"kernel {place:02}" for place in range(1, 16))
_WHOLE = "whole"


@dataclass(frozen=True)
class Span:
    """A kernel, a copy or an op; `own_us` is its time without the spans within it."""

    name: str
    start_us: float
    end_us: float
    own_us: float


def cases(session: Session) -> list[Case]:
    """Return a decode and an encode: the whole, the groups, and the longest kernels."""
    size = session.pick((81, 720, 1280), (5, 32, 48))
    clips = [Clip("wan2.1", direction, *size) for direction in ("decode", "encode")]
    kinds = (_WHOLE, *GROUPS, *_TOP)
    return [Case(clip.label, kinds, functools.partial(_table, session, clip)) for clip in clips]


def group(name: str, own: frozenset[str]) -> str:
    """Return the group of a span, where `own` are the names of this pack's kernels."""
    function = re.split(r"[(<]", name.removeprefix("void "))[0]
    space, _, last = function.rpartition("::")
    if space == "fast_video_vae" or (last in own and space not in ("aten", "prims")):
        return _OWN
    return next((kind for kind, text in _GROUPS.items() if re.search(text, name)), _OTHER)


def busy_us(spans: Iterable[Span]) -> float:
    """Return the microseconds in which at least one span runs."""
    busy, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        busy += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return busy


def own_names() -> frozenset[str]:
    """Return the names of this pack's Triton and CUDA kernels, read from their sources."""
    root = Path(kernels.__file__).parent
    patterns = {"*.py": r"@triton\.jit[^\n]*\ndef (\w+)", "*.cu*": r"FVV_KERNEL (\w+)\("}
    found: set[str] = set()
    for files, pattern in patterns.items():
        for path in root.rglob(files):
            found |= set(re.findall(pattern, path.read_text(encoding="utf-8")))
    return frozenset(found)


def by_group(spans: Sequence[Span], own: frozenset[str]) -> dict[str, Values]:
    """Return milliseconds, share and number of spans by group."""
    times, counts = dict.fromkeys(GROUPS, 0.0), Counter()
    for span in spans:
        kind = group(span.name, own)
        times[kind] += span.own_us
        counts[kind] += 1
    return {kind: _values(time_us, times, counts[kind]) for kind, time_us in times.items()}


def longest(spans: Sequence[Span]) -> list[Values]:
    """Return the names with most time, with milliseconds, share and number of spans."""
    times, counts = defaultdict[str, float](float), Counter()
    for span in spans:
        times[span.name] += span.own_us
        counts[span.name] += 1
    ordered = sorted(times, key=lambda name: -times[name])
    return [{**_values(times[name], times, counts[name]), "kernel": name[:120]} for name in ordered]


def _values(time_us: float, times: dict[str, float], count: int) -> Values:
    total = sum(times.values())
    return {
        "ms": time_us / 1e3, "percent": 100 * time_us / total if total else 0.0, "calls": count
    }  # fmt: skip


def _table(session: Session, clip: Clip) -> Results:
    vae, x = session.ours(clip.family), clip.make(session)
    call = functools.partial(getattr(vae, clip.direction), x)
    with torch.inference_mode():
        for _ in range(2):  # compilation and trials, then the memory of a warm run
            call()
        warm_s = min(_seconds(call, session) for _ in range(2))
        spans, profiled_s = _spans(call, session)
    busy_s = busy_us(spans) / 1e6
    yield (
        _WHOLE,
        {
            "s": warm_s,
            "busy_s": busy_s,
            "idle_percent": max(0.0, 100 * (1 - busy_s / warm_s)),
            "calls": len(spans),
            "profiled_s": profiled_s,
        },
    )
    yield from by_group(spans, own_names()).items()
    names = longest(spans)
    for place, kind in enumerate(_TOP):
        yield kind, names[place] if place < len(names) else Missing(f"only {len(names)} kernels")


def _seconds(call: Callable[[], object], session: Session) -> float:
    synchronize(session.device)
    start = time.perf_counter()
    result = call()
    synchronize(session.device)
    seconds = time.perf_counter() - start
    del result
    return seconds


def _spans(call: Callable[[], object], session: Session) -> tuple[list[Span], float]:
    """Return the spans of a call on the device, and its seconds under the profiler."""
    kind = "CUDA" if session.cuda else "CPU"
    # Recording ops on the CPU would slow the launches down, so it comes second.
    tries = [[ProfilerActivity.CUDA], [ProfilerActivity.CPU, ProfilerActivity.CUDA]]
    for activities in tries if session.cuda else [[ProfilerActivity.CPU]]:
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = _seconds(call, session)
        spans = [
            Span(event.name, event.time_range.start, event.time_range.end, _own_us(event))
            for event in profiler.events() or ()
            if event.device_type.name == kind and not getattr(event, "is_user_annotation", False)
        ]
        if spans:
            return spans, seconds
    raise Missing("torch.profiler recorded no kernel on this device")


def _own_us(event: Any) -> float:
    if event.device_type.name == "CPU":
        return event.self_cpu_time_total
    return event.time_range.end - event.time_range.start
