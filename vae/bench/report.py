"""Results of a benchmark as a Markdown table, JSON, or lines of text."""

import json
import math
import statistics
from dataclasses import dataclass

import torch

from .content import Clip
from .precision import PrecisionReport
from .tables import finite, markdown

ENCODE, DECODE = "encode", "decode"

_GIB, _MIB = 2**30, 2**20


@dataclass
class Result:
    """Measurements of one contestant; None: not measured, or not comparable."""

    name: str
    seconds: tuple[float, ...] = ()  # of each round
    peak_bytes: int | None = None
    psnr: float | None = None  # of a decode against the first contestant, in dB
    relative_error: float | None = None  # of an encode: norm of the difference over the norm
    failure: str | None = None  # why it stopped; None: it completed

    @property
    def median(self) -> float | None:
        """Median of the rounds, in seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def best(self) -> float | None:
        """Fastest round, in seconds."""
        return min(self.seconds, default=None)

    def agreement(self) -> str:
        """Describe the difference to the first contestant's result; empty if unknown."""
        value, none = (self.psnr, math.inf) if self.psnr is not None else (self.relative_error, 0)
        if value is None:
            return ""
        if math.isnan(value):
            return "not finite"
        if value == none:
            return "identical"
        return f"PSNR {value:.1f} dB" if none else f"relative error {value:.1e}"


@dataclass(frozen=True)
class Comparison:
    """Measurements of one task, "encode" or "decode", in one dtype, such as "bf16".

    The first result is the baseline of the others.
    """

    task: str
    dtype: str
    results: tuple[Result, ...]

    def speed(self, result: Result) -> float | None:
        """Return how many times as fast as the first contestant `result` is, by medians."""
        return _ratio(self.results[0].median, result.median)

    def thrift(self, result: Result) -> float | None:
        """Return how many times less memory than the first contestant `result` takes."""
        return _ratio(self.results[0].peak_bytes, result.peak_bytes)

    def cells(self, result: Result) -> list[str]:
        """Return the row of `result` in the table."""
        speed, failed = self.speed(result), result.failure
        return [
            *(self.task, self.dtype, result.name, failed or seconds(result.median)),
            *(seconds(result.best), "-" if speed is None else times(speed)),
            *("-" if failed else size(result.peak_bytes), result.agreement() or "-"),
        ]

    def words(self, result: Result) -> str:
        """Return how `result` compares with that of the first contestant."""
        if result.failure is not None:
            return result.failure
        first, speed, taken = self.results[0], self.speed(result), seconds(result.median)
        if speed is None:
            words = [f"{taken}; {first.name}: {first.failure}"]
        else:
            words = [f"{times(speed)} as fast, {taken} instead of {seconds(first.median)}"]
        if self.thrift(result) is not None:
            words.append(f"{size(result.peak_bytes)} instead of {size(first.peak_bytes)}")
        return "; ".join(filter(None, [*words, result.agreement()]))

    def record(self, result: Result) -> dict[str, object]:
        """Return the measurements of `result` for JSON, which has no infinity."""
        return {
            "name": result.name,
            "seconds": list(result.seconds),
            "median_s": result.median,
            "best_s": result.best,
            "peak_bytes": result.peak_bytes,
            "psnr_db": finite(result.psnr),
            "relative_error": finite(result.relative_error),
            "identical": result.agreement() == "identical",
            "failure": result.failure,
            "speed": self.speed(result),
        }


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
        head = ["task", "dtype", "VAE", "median", "best", "speed", "peak memory", against]
        rows = [each.cells(result) for each in self.comparisons for result in each.results]
        lines = [f"{self.clip}; {self.vae}; {self.device}; {counted}", ""]
        lines += markdown([head, *rows])
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
            "tasks": [
                {
                    "task": each.task,
                    "dtype": each.dtype,
                    "results": [each.record(result) for result in each.results],
                }
                for each in self.comparisons
            ],
            "notes": list(self.notes),
            "precision": self.precision.record() if self.precision else None,
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def summary(self) -> str:
        """Return a line for each task and contestant but the first."""
        return "\n".join(
            f"{each.task}, {result.name}: {each.words(result)}"
            for each in self.comparisons
            for result in each.results[1:]
        )


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


def _ratio(first: float | None, other: float | None) -> float | None:
    return first / other if first and other else None
