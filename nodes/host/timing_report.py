"""The table of measured times.

Pieces can lie within each other: a kernel is built while a VAE decodes. The time of a piece
excludes the pieces directly within it, so that the rows add up to the measured time.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kernels import padded

# Kinds in the order of the table; others follow in order of time.
KINDS = (
    "load",
    "compile",
    "kernel build",
    "graph capture",
    "conditioning",
    "LoRA attach",
    "denoise",
    "switch",
    "VAE encode",
    "VAE decode",
    "file",
)


class Measured(NamedTuple):
    """A piece of work, on the host's clock in seconds; `seconds` includes pieces within it."""

    kind: str
    label: str
    start: float
    end: float
    seconds: float
    thread: int = 0
    sure: bool = True  # the seconds are final: measured by the device, or without one


@dataclass
class TimingRow:
    """All pieces of one kind and label, with the seconds of each without pieces within it."""

    kind: str
    label: str
    seconds: list[float] = field(default_factory=list)
    sure: bool = True

    @property
    def total(self) -> float:
        """Seconds of all pieces."""
        return sum(self.seconds)

    def numbers(self) -> dict[str, float]:
        """Return count and seconds, with min and median for more than one piece."""
        result = {"count": len(self.seconds), "seconds": self.total}
        if len(self.seconds) > 1:
            result["min"] = min(self.seconds)
            result["median"] = statistics.median(self.seconds)
        return result


@dataclass(frozen=True)
class TimingReport:
    """The measured times of one prompt, in the order of their ends."""

    prompt: str
    pieces: Sequence[Measured]
    stopped: str = ""  # "interrupted", "failed", or "stopped" for an unknown reason

    @property
    def wall(self) -> float:
        """Seconds from the first moment to the last, on the host's clock."""
        if not self.pieces:
            return 0.0
        return max(piece.end for piece in self.pieces) - min(piece.start for piece in self.pieces)

    def rows(self) -> list[TimingRow]:
        """Return a row for every kind and label, in the order of the table."""
        rows: dict[tuple[str, str], TimingRow] = {}
        for piece, seconds in _alone(self.pieces):
            row = rows.setdefault(piece[:2], TimingRow(*piece[:2]))
            row.seconds.append(seconds)
            row.sure = row.sure and piece.sure
        return sorted(rows.values(), key=lambda row: _place(row.kind))

    def table(self) -> str:
        """Return a line of totals, a header, and a line per row; seconds have three digits."""
        if not self.pieces:
            return "Fast Video VAE: no time was measured"
        rows = self.rows()
        total = sum(row.total for row in rows)
        first = f"Fast Video VAE: {total:.3f} s measured of {self.wall:.3f} s"
        lines = [f"{first} ({self.stopped})" if self.stopped else first]
        lines += _aligned([("", "", "count", "seconds", "min", "median"), *map(_cells, rows)])
        if not all(row.sure for row in rows):
            lines.append("  ~ the device is busy: time of the host")
        return "\n".join(lines)

    def json(self) -> str:
        """Return the report as one line of JSON; all times are in seconds."""
        rows = self.rows()
        cells = [
            {"kind": row.kind, "label": row.label, **row.numbers(), "sure": row.sure}
            for row in rows
        ]
        measured = sum(row.total for row in rows)
        return json.dumps(
            {
                "prompt": self.prompt,
                "wall": self.wall,
                "measured": measured,
                "stopped": self.stopped,
                "rows": cells,
            }
        )


# A piece within another one of its own kind and label is part of that one.
def _alone(pieces: Sequence[Measured]) -> list[tuple[Measured, float]]:
    """Return the pieces by their start, with the seconds that inner pieces do not cover."""
    # Of two pieces with the same ends, the one added later encloses the other.
    order = sorted(range(len(pieces)), key=lambda at: (pieces[at].start, -pieces[at].end, -at))
    within: dict[int, float] = {}  # seconds, by the index of the piece
    around: dict[int, list[int]] = {}  # by thread, the outermost first
    for at in order:
        piece = pieces[at]
        stack = around.setdefault(piece.thread, [])
        while stack and pieces[stack[-1]].end < piece.end:
            stack.pop()
        if stack:
            if pieces[stack[-1]][:2] == piece[:2]:
                continue
            within[stack[-1]] += piece.seconds
        within[at] = 0.0
        stack.append(at)
    return [(pieces[at], max(0.0, pieces[at].seconds - inner)) for at, inner in within.items()]


def _place(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _cells(row: TimingRow) -> tuple[str, ...]:
    numbers = row.numbers()
    seconds = (f"{numbers[key]:.3f}" if key in numbers else "" for key in ("min", "median"))
    mark = "" if row.sure else "~"
    return row.kind, row.label, str(numbers["count"]), f"{mark}{row.total:.3f}", *seconds


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    """Align words left and numbers right, without empty columns."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    words = 2 if any(line[1] for line in lines) else 1
    rows = padded(list(zip(*columns, strict=True)), words)
    return [("  " + "  ".join(row)).rstrip() for row in rows]
