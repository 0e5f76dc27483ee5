"""The rows of a run as text: a table per section, the meaning of its columns, and the targets."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fast_video_vae.kernels import padded

_WIDTH = 100


@dataclass(frozen=True)
class Column:
    """How a value is shown."""

    heading: str
    meaning: str  # below the table
    digits: int = 2  # decimal places of a float


COLUMNS = {
    "ms": Column(
        "ms",
        "milliseconds of a call, warm, median of 3 rounds of 5 calls; `profile`: of all calls",
        3,
    ),
    "s": Column("s", "seconds, warm, synchronised, median of the rounds", 3),
    "as_it_is_s": Column("as it is", "seconds of the unchanged decode, in turn with it", 3),
    "gb_per_s": Column(
        "GB/s", "bytes that must be moved (each tensor read or written once) per second", 0
    ),
    "copy_percent": Column("% copy", "share of the GB/s of the largest copy in this run", 0),
    "tflops": Column(
        "TFLOP/s",
        "10^12 FLOPs per second; in `vae` each implementation counts with the FLOPs of this pack's "
        "layers, so that extra work does not raise the rate",
        3,
    ),
    "floor_percent": Column(
        "% floor",
        "time of this pack's FLOPs at the rate of the bf16 product of 8192 x 8192 in this run (256 "
        "x 256 in a small run), over the measured seconds",
        0,
    ),
    "times_ours": Column("x ours", "ratio to this pack's seconds, median of the pairs"),
    "times_as_it_is": Column(
        "x as it is", "ratio to the unchanged seconds: above 1, the change is slower"
    ),
    "times_stays": Column("x stays", "ratio to the same work without a copy from or to the host"),
    "peak_gib": Column(
        "peak GiB", "peak VRAM above weights and input, result included; warm runs only"
    ),
    "as_it_is_peak_gib": Column("as it is", "peak VRAM of the unchanged decode"),
    "image_gb": Column("image GB", "size of the images", 3),
    "rank": Column("trial", "rank of the backend in the trial at run time; 1 is used", 0),
    "apart": Column("apart", "largest difference to the reference over its largest value", 5),
    "snr_db": Column(
        "dB",
        "signal-to-noise ratio against this pack's result (`ablation`: the unchanged result), "
        "rounding included; 999: equal",
        1,
    ),
    "cold_s": Column("first s", "first run of this size, with compilation, trials and searches", 2),
    "first_ms": Column(
        "first ms", "first call in its thread, with cuDNN's search if it searches", 1
    ),
    "rounds": Column("rounds", "number of rounds", 0),
    "planned_gib": Column("planned GiB", "estimate of the plan, without the frames", 2),
    "times_whole": Column("whole", "ratio to the seconds with whole frames", 2),
    "times_plain": Column("plain", "ratio to the time without a LoRA", 3),
    "plan": Column("plan", "the chosen plan", 0),
    "same_plan": Column("same", "whether the plan equals that of the first decode", 0),
    "failures": Column("failures", "allocations that failed, in one decode", 0),
    "busy_s": Column("busy s", "seconds in which a kernel or a copy runs, under the profiler", 3),
    "idle_percent": Column("% idle", "share of the unprofiled seconds in which nothing runs", 1),
    "profiled_s": Column("profiled s", "seconds of the call under the profiler", 3),
    "percent": Column("% time", "share of the time of all kernels, copies or ops", 1),
    "calls": Column("calls", "number of kernels, copies or ops", 0),
    "passed": Column("passed", "tests that passed", 0),
    "failed": Column("failed", "tests that failed", 0),
    "skipped": Column("skipped", "tests that were skipped", 0),
    "ended": Column("ended", "whether all tests were run", 0),
    "failing": Column("failing", "the first of them; the log next to the rows has the reasons", 0),
    "kernel": Column("kernel", "its name; on a CPU the name of PyTorch's op", 0),
    "version": Column("version", "version of the peer", 0),
}

TITLES = {
    "copy": "Limits of the device: copies within its memory, and matrix products",
    "tests": "Tests on this device",
    "profile": "Where the time of a decode and an encode goes",
    "conv": "Convolutions by channels in and out, and frames out x height x width",
    "vae": "Whole clips, random weights, this pack and the peers in turn",
    "users": "A decode with the free memory of users' cards",
    "twice": "Two decodes in a row, without releasing PyTorch's cached memory",
    "reference": "Every op by PyTorch alone",
    "ablation": "This pack's decode with one optimisation changed at a time",
    "host": "Decodes to images in host memory, and encodes of such images",
    "attention": "Attention of one head over the pixels of a frame",
    "ops": "Ops on each backend, tensors larger than any cache",
    "plans": "Measured and planned memory under decreasing limits",
    "lora": "A LoRA on linear layers in bf16: this pack's modes and other methods",
    "streams": "Decodes to 8-bit pictures that leave the device while it runs",
}

# Targets of PENDING.md.
ASKED_RATIO = 2.5
ASKED_COPY_PERCENT = 80


def report(content: Mapping[str, Any]) -> str:
    """Return the tables of all sections, the targets and the counts of rows."""
    rows = content["rows"]
    lines = ["", "=" * _WIDTH, *_machine(content)]
    for section, title in TITLES.items():
        own = [row for row in rows if row["section"] == section]
        if own:
            lines += ["", f"{section.upper()}: {title}", *_table(own)]
    if not content["small"]:
        lines += ["", "TARGETS", *_asked(rows)]
    counts = Counter(row["status"] for row in rows).items()
    lines += ["", "Rows: " + ", ".join(f"{count} {status}" for status, count in counts)]
    return "\n".join(lines)


def _machine(content: Mapping[str, Any]) -> list[str]:
    facts = content["machine"]
    shown = "; ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    lines = textwrap.wrap(shown, _WIDTH)
    if content["small"]:
        lines.append(
            f"SMALL RUN on {content['device']}: tiny sizes, to check that every row runs; the "
            "numbers mean nothing"
        )
    return lines


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = [key for key in COLUMNS if any(key in row["values"] for row in rows)]
    cells = [["", *(COLUMNS[key].heading for key in keys)]]
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "ok":
            cells.append([row["name"], *(_cell(key, row["values"].get(key)) for key in keys)])
        else:
            others.setdefault(f"{row['status']}, {row['reason']}", []).append(row["name"])
    lines = ["  ".join(line).rstrip() for line in padded(cells, 1)]
    lines.insert(1, "-" * max(map(len, lines)))
    for why, names in others.items():
        lines += _wrapped("  ", f"{why}: {'; '.join(names)}")
    for key in keys:
        lines += _wrapped(f"  {COLUMNS[key].heading}: ", COLUMNS[key].meaning)
    return lines


def _asked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    values = {row["name"]: row["values"] for row in rows if row["status"] == "ok"}
    lines = []
    for peer in ("diffusers", "comfyui"):
        times = values.get(f"Wan2.1 decode 720x1280x81, bf16: {peer}", {}).get("times_ours")
        found = "not measured"
        if times is not None:
            found = f"{times:.2f}x, {'reached' if times >= ASKED_RATIO else 'MISSED'}"
        lines.append(f"  decode 720x1280x81, {peer} / ours, at least {ASKED_RATIO}: {found}")
    return lines + _asked_of_ops(rows)


def _asked_of_ops(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines on ops, each by the backend that dispatch uses."""
    serving = {
        row["name"].rpartition(":")[0]: row["values"]["copy_percent"]
        for row in rows
        if row["section"] == "ops" and row["values"].get("rank") == 1
    }
    if not serving:
        return [f"  ops, at least {ASKED_COPY_PERCENT} % of a copy: not measured"]
    slow = {name: share for name, share in serving.items() if share < ASKED_COPY_PERCENT}
    lines = [
        f"  ops whose selected backend reaches {ASKED_COPY_PERCENT} % of a copy: "
        f"{len(serving) - len(slow)} of {len(serving)}"
    ]
    below = "; ".join(f"{name} {share:.0f} %" for name, share in slow.items())
    return lines + (_wrapped("    below: ", below) if below else [])


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{min(COLUMNS[key].digits, 1) if abs(value) >= 100 else COLUMNS[key].digits}f}"


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * min(len(label), 8)
    return textwrap.wrap(text, _WIDTH, initial_indent=label, subsequent_indent=indent)
