"""The rows of a run as text: a table for each section, what its columns mean, and what is asked."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fast_video_vae.kernels import padded

_WIDTH = 100


@dataclass(frozen=True)
class Column:
    """How a value is told."""

    heading: str
    meaning: str  # below the table
    digits: int = 2  # behind the point, for a number


COLUMNS = {
    "ms": Column("ms", "milliseconds of a call, warm, the median of 3 rounds of 5 calls", 3),
    "s": Column("s", "seconds, warm, synchronised, the median of the rounds", 3),
    "as_it_is_s": Column("as it is", "seconds of our decode unchanged, in turn with it", 3),
    "gb_per_s": Column(
        "GB/s", "bytes that have to be moved (each tensor read or written once) in a second", 0
    ),
    "copy_percent": Column("% copy", "of the GB/s of the largest copy in this run", 0),
    "tflops": Column(
        "TFLOP/s",
        "10^12 FLOPs in a second; in `vae` those of our layers for everybody, so that who does "
        "more for the same frames does not look better",
        3,
    ),
    "floor_percent": Column(
        "% floor",
        "what our layers' FLOPs alone take at the rate of the bf16 product of 8192 x 8192 in this "
        "run (256 x 256 in a small one), over the seconds",
        0,
    ),
    "times_ours": Column("x ours", "how many times as long as ours, the median of the pairs"),
    "times_as_it_is": Column(
        "x as it is", "how many times as long as unchanged: above 1, the change costs"
    ),
    "times_stays": Column("x stays", "how many times as long as the decode alone"),
    "peak_gib": Column(
        "peak GiB", "the most VRAM above weights and input, result included; warm runs alone"
    ),
    "as_it_is_peak_gib": Column("as it is", "likewise, of our decode unchanged"),
    "image_gb": Column("image GB", "size of the images", 3),
    "rank": Column("trial", "the place that the trial at run time gave the backend; 1 serves", 0),
    "apart": Column(
        "apart", "largest difference to the reference, over the reference's largest number", 5
    ),
    "snr_db": Column(
        "dB",
        "signal over difference to ours (`ablation`: to ours unchanged), rounding included; 999: "
        "equal",
        1,
    ),
    "cold_s": Column(
        "first s", "the first run of this size: compiles, trials and searches included", 2
    ),
    "first_ms": Column(
        "first ms", "the first call in its thread: cuDNN's search for a plan, where it searches", 1
    ),
    "rounds": Column("rounds", "how many", 0),
    "said_gib": Column("said GiB", "what the plan says that it takes beside the frames", 2),
    "times_whole": Column("whole", "how many times as long as with whole frames", 2),
    "times_plain": Column("plain", "how many times as long as without a LoRA", 3),
    "plan": Column("plan", "what was chosen", 0),
    "version": Column("version", "of the peer", 0),
}

TITLES = {
    "copy": "Limits of the device: copies within its memory, and matrix products",
    "ops": "Ops on each backend, tensors larger than any cache",
    "vae": "Whole clips, random weights, ours and the peers in turn",
    "ablation": "Our decode with one thing changed at a time",
    "attention": "Attention of one head over the pixels of a frame",
    "conv": "Convolutions by width: channels in = channels out, frames out x height x width",
    "plans": "What plans take and what they say, within less and less memory",
    "lora": "A LoRA on linear layers in bf16, in our modes and in others' ways",
    "host": "Decodes whose images end in the memory of the host",
}

# What PENDING.md asks.
ASKED_RATIO = 2.5
ASKED_COPY_PERCENT = 80


def report(content: Mapping[str, Any]) -> str:
    """Everything, as it is printed last."""
    rows = content["rows"]
    lines = ["", "=" * _WIDTH, *_machine(content)]
    for section, title in TITLES.items():
        own = [row for row in rows if row["section"] == section]
        if own:
            lines += ["", f"{section.upper()}: {title}", *_table(own)]
    if not content["small"]:
        lines += ["", "WHAT IS ASKED", *_asked(rows)]
    counts = Counter(row["status"] for row in rows).items()
    lines += ["", "Rows: " + ", ".join(f"{count} {status}" for status, count in counts)]
    return "\n".join(lines)


def _machine(content: Mapping[str, Any]) -> list[str]:
    facts = content["machine"]
    told = "; ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    lines = textwrap.wrap(told, _WIDTH)
    if content["small"]:
        lines.append(
            f"SMALL RUN on {content['device']}: tiny sizes, to see that every row runs; no number "
            "means anything"
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
        told = "not measured"
        if times is not None:
            told = f"{times:.2f}x, {'reached' if times >= ASKED_RATIO else 'MISSED'}"
        lines.append(f"  decode 720x1280x81, {peer} / ours, at least {ASKED_RATIO}: {told}")
    return lines + _asked_of_ops(rows)


def _asked_of_ops(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each op and width the backend that serves."""
    serving = {
        row["name"].rpartition(":")[0]: row["values"]["copy_percent"]
        for row in rows
        if row["section"] == "ops" and row["values"].get("rank") == 1
    }
    if not serving:
        return [f"  ops, at least {ASKED_COPY_PERCENT} % of a copy: not measured"]
    slow = {name: share for name, share in serving.items() if share < ASKED_COPY_PERCENT}
    lines = [
        f"  ops whose serving backend reaches {ASKED_COPY_PERCENT} % of a copy: "
        f"{len(serving) - len(slow)} of {len(serving)}"
    ]
    told = "; ".join(f"{name} {share:.0f} %" for name, share in slow.items())
    return lines + (_wrapped("    below: ", told) if told else [])


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{min(COLUMNS[key].digits, 1) if abs(value) >= 100 else COLUMNS[key].digits}f}"


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * min(len(label), 8)
    return textwrap.wrap(text, _WIDTH, initial_indent=label, subsequent_indent=indent)
