"""Cells of the tables: seconds and ratios, cases, commits, machines."""

import re
from collections.abc import Iterable, Mapping, Sequence

from .rows import Row, by_case

_DEVICES = {
    "AMD EPYC, 2 threads, avx512_bf16": "2 cores of an AMD EPYC (Zen 5, avx512_bf16)",
    "Intel(R) Xeon(R) Processor, 2 threads, avx512f": "2 cores of an Intel Xeon (avx512f)",
}
FAMILIES = {"wan2.1": "Wan 2.1", "wan2.2": "Wan 2.2", "seedvr2": "SeedVR2"}
PEERS = ("comfyui", "diffusers")
NAMES = {"comfyui": "ComfyUI", "diffusers": "diffusers", "ours": "this pack"}


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def compared(rows: list[Row]) -> str:
    """Seconds of the peers that have any and of this pack, by case."""
    body = []
    peers = [name for name in PEERS if any(_is(row, name) for row in rows)]
    for case, each in by_case(rows).items():
        ours = each["ours"]
        body.append([case_of(case), *seconds(each, peers), str(len(ours["seconds"])), origin(ours)])
    head = [f"{NAMES[name]} {_version(rows, name)}" for name in peers]
    head = ["case", *head, "this pack", "rounds", "commit"]
    return with_machine(table(head, body), ours)


def peaks(each: Mapping[str, Row]) -> str:
    """Peak memory of both peers and of this pack, if it was measured."""
    rows = [each.get(name, {}) for name in (*PEERS, "ours")]
    return ", ".join(f"{row['peak_gib']:.1f}" for row in rows if "peak_gib" in row)


def seconds(each: Mapping[str, Row], peers: Sequence[str]) -> list[str]:
    """Seconds of the peers and of this pack, the fewest in bold.

    In brackets how many times as long a peer takes: the median of the rounds' ratios, if stored.
    """
    ours = each["ours"]
    cells = {}
    for name in peers:
        cells[name] = ""
        if row := each.get(name):
            ratio = row.get("ours_is_faster_by", value(row) / value(ours))
            cells[name] = f"{value(row):.2f} ({ratio:.2f}x)"
    cells["ours"] = f"{value(ours):.2f}"
    fewest = min((name for name in cells if name in each), key=lambda name: value(each[name]))
    cells[fewest] = f"**{cells[fewest]}**"
    return list(cells.values())


def _version(rows: list[Row], name: str) -> str:
    return [row["version"] for row in rows if _is(row, name)][-1]


def _is(row: Row, name: str) -> bool:
    return row.get("implementation") == name


def value(row: Row) -> float:
    return row["median_s"] if "median_s" in row else row["s"]


def case_of(case: str) -> str:
    """A case with readable sizes and dtypes."""
    words = size_of(case).replace("bfloat16", "bf16").replace("float32", "fp32")
    for name, family in FAMILIES.items():
        words = words.replace(f" {name}", f", {family}")
    return words


def size_of(text: str) -> str:
    return re.sub(r"(?<=\d)x(?=\d)", " x ", text)


def origin(row: Row) -> str:
    """The commit and the day of a row."""
    return f"{row['commit']}, {row['date'][:10]}"


def device_of(row: Row) -> str:
    return _DEVICES.get(row["machine"], row["machine"])


def with_machine(lines: str, row: Row) -> str:
    return f"{device_of(row)}, PyTorch {row['torch']}:\n\n{lines}"


def with_commit(lines: str, row: Row) -> str:
    return f"Commit {origin(row)}:\n\n{lines}"
