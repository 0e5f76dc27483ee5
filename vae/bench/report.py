"""Results of a benchmark as a Markdown table, JSON, or lines of text."""

import json
from dataclasses import asdict, dataclass, field

import torch

from .content import Clip
from .precision import PrecisionReport
from .tables import markdown

ENCODE, DECODE = "encode", "decode"

_GIB, _MIB = 2**30, 2**20


@dataclass
class Result:
    """Measurements of one contestant, as in JSON; None: not measured, or not comparable."""

    name: str
    seconds: list[float] = field(default_factory=list)  # of each round
    median_s: float | None = None
    best_s: float | None = None
    peak_bytes: int | None = None
    psnr_db: float | None = None  # of a decode against the first contestant
    relative_error: float | None = None  # of an encode: norm of the difference over the norm
    identical: bool = False  # to the result of the first contestant
    agreement: str = ""  # in words; empty: unknown
    failure: str | None = None  # why it stopped; None: it completed
    speed: float | None = None  # times as fast as the first contestant, by medians
    thrift: float | None = None  # times less memory than the first contestant


@dataclass(frozen=True)
class Comparison:
    """Measurements of one task, "encode" or "decode", in one dtype, such as "bf16".

    The first result is the baseline of the others.
    """

    task: str
    dtype: str
    results: list[Result]


@dataclass(frozen=True)
class BenchmarkReport:
    """All measurements: a comparison per task, notes, and what int8 costs if it was measured."""

    vae: str
    device: str
    clip: Clip
    rounds: int
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    precision: PrecisionReport | None = None

    def table(self) -> str:
        """Return all figures as a Markdown table below a line with the conditions."""
        counted = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        against = f"against {self.comparisons[0].results[0].name}"
        rows = [["task", "dtype", "VAE", "median", "best", "speed", "peak memory", against]]
        for each in self.comparisons:
            for result in each.results:
                speed = "-" if result.speed is None else times(result.speed)
                memory = "-" if result.failure else size(result.peak_bytes)
                taken = result.failure or seconds(result.median_s), seconds(result.best_s)
                found = speed, memory, result.agreement or "-"
                rows.append([each.task, each.dtype, result.name, *taken, *found])
        lines = [f"{self.clip}; {self.vae}; {self.device}; {counted}", "", *markdown(rows)]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        lines += ["", self.precision.table()] if self.precision else []
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return all figures as JSON, including each round."""
        content = {
            "vae": self.vae,
            "device": self.device,
            "torch": torch.__version__,
            **vars(self.clip),
            "rounds": self.rounds,
            "tasks": [asdict(each) for each in self.comparisons],
            "notes": list(self.notes),
            "precision": self.precision.record() if self.precision else None,
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def summary(self) -> str:
        """Return a line for each task and contestant but the first, compared with the first."""
        lines = []
        for each in self.comparisons:
            first = each.results[0]
            for result in each.results[1:]:
                taken = seconds(result.median_s)
                words = [f"{taken}; {first.name}: {first.failure}"]
                if result.speed is not None:
                    instead = f"{taken} instead of {seconds(first.median_s)}"
                    words = [f"{times(result.speed)} as fast, {instead}"]
                if result.thrift is not None:
                    words.append(f"{size(result.peak_bytes)} instead of {size(first.peak_bytes)}")
                words += [result.agreement] if result.agreement else []
                lines.append(f"{each.task}, {result.name}: {result.failure or '; '.join(words)}")
        return "\n".join(lines)


def tasks_of(choice: str) -> tuple[str, ...]:
    """Return the tasks of `choice`: "encode", "decode" or "both"."""
    return (ENCODE, DECODE) if choice == "both" else (choice,)


def seconds(value: float | None) -> str:
    """Format `value` in seconds with about three digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 4}f} s"


def size(value: int | None) -> str:
    """Format `value` in bytes as MiB or GiB; "not measured" for None."""
    if value is None:
        return "not measured"
    return f"{value / _GIB:.2f} GiB" if value >= _GIB else f"{value / _MIB:.0f} MiB"


def times(ratio: float) -> str:
    """Format `ratio` as in "1.83x" or "12.4x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"
