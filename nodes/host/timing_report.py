"""The table of where time went, from measured pieces.

Pieces lie within one another: a kernel is built while a VAE decodes. A piece is shown without the
pieces directly within it, so that the rows add up to the time that was measured.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kernels import padded

# In the order of the table; others follow as they come.
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
    """A piece of work, from its start to its end on the host's clock.

    Attributes:
        seconds: That it took, with all that lies within it.
        sure: The device has told the seconds, or has no say in them.
    """

    kind: str
    label: str
    start: float
    end: float
    seconds: float
    thread: int = 0
    sure: bool = True


@dataclass
class TimingRow:
    """All pieces of one kind and label: the seconds of each, without what lies within it.

    They are `sure` where no device is still at work on one of them.
    """

    kind: str
    label: str
    seconds: list[float] = field(default_factory=list)
    sure: bool = True

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return sum(self.seconds)

    def numbers(self) -> dict[str, float]:
        """What is told of it, with min and median where there is more than one piece."""
        result = {"count": len(self.seconds), "seconds": self.total}
        if len(self.seconds) > 1:
            result["min"] = min(self.seconds)
            result["median"] = statistics.median(self.seconds)
        return result


@dataclass(frozen=True)
class TimingReport:
    """What is told about one prompt.

    Attributes:
        prompt: Its id; "": none.
        pieces: In the order in which they ended.
        stopped: "interrupted", "failed", or "stopped" where it is not known which; "": none.
    """

    prompt: str
    pieces: Sequence[Measured]
    stopped: str = ""

    @property
    def wall(self) -> float:
        """Seconds from the first moment to the last, on the host's clock."""
        if not self.pieces:
            return 0.0
        return max(piece.end for piece in self.pieces) - min(piece.start for piece in self.pieces)

    def rows(self) -> list[TimingRow]:
        """One for every kind and label, in the order of the table."""
        rows: dict[tuple[str, str], TimingRow] = {}
        for piece, seconds in _alone(self.pieces):
            row = rows.setdefault(piece[:2], TimingRow(*piece[:2]))
            row.seconds.append(seconds)
            row.sure = row.sure and piece.sure
        return sorted(rows.values(), key=lambda row: _place(row.kind))

    def table(self) -> str:
        """A line of totals, a header, and a line for every row; seconds have three digits."""
        if not self.pieces:
            return "Fast Video VAE: no time was measured"
        rows = self.rows()
        total = sum(row.total for row in rows)
        first = f"Fast Video VAE: {total:.3f} s measured of {self.wall:.3f} s"
        lines = [f"{first} ({self.stopped})" if self.stopped else first]
        lines += _aligned([("", "", "count", "seconds", "min", "median"), *map(_cells, rows)])
        if not all(row.sure for row in rows):
            lines.append("  ~ the device is still at work: the host's time")
        return "\n".join(lines)

    def json(self) -> str:
        """The same as one line of JSON.

        `prompt`, `wall` and `measured` in seconds, `stopped`, and `rows`: a list of `kind`,
        `label`, `count`, `seconds`, `sure`, and with more than one piece `min` and `median`.
        """
        rows = self.rows()
        told = [
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
                "rows": told,
            }
        )


def _alone(pieces: Sequence[Measured]) -> list[tuple[Measured, float]]:
    """The pieces, each with its seconds without those directly within it, in order of their start.

    One that lies in another one of its own kind and label is a part of that, and left out.
    """
    # Where two have the same ends, the one that was added later is around the other.
    order = sorted(range(len(pieces)), key=lambda at: (pieces[at].start, -pieces[at].end, -at))
    within: dict[int, float] = {}  # seconds, by the place of the piece
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
    """Words to the left, numbers to the right, and no column without anything in it."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    words = 2 if any(line[1] for line in lines) else 1
    rows = padded(list(zip(*columns, strict=True)), words)
    return [("  " + "  ".join(row)).rstrip() for row in rows]
