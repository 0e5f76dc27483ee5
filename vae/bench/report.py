"""Results of a benchmark as a Markdown table, JSON, or lines of text."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from ...kernels import padded
from ..streaming.int8.layers import Int8Layers
from .content import Clip

ENCODE, DECODE = "encode", "decode"

# Short names of dtypes, as in the command line and the nodes.
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

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
class PrecisionReport:
    """A decode in bfloat16 and one with int8, each against float32 on the same weights."""

    clip: Clip
    dtype: str  # of the layers that are not in int8
    bf16: str  # its name: a CPU whose convolutions in bfloat16 are slow computes in float32
    bf16_db: float  # PSNR against float32; infinite if equal
    int8_db: float
    layers: Int8Layers

    @property
    def loss_db(self) -> float:
        """Decibels that int8 has less than bfloat16; negative where it has more."""
        return 0.0 if self.int8_db == self.bf16_db else self.bf16_db - self.int8_db

    def text(self) -> str:
        """Return the report as lines and a table with aligned columns."""
        bf16, int8, loss = self._results()
        part = f"{len(self.layers.names)} of {len(self.layers.rows)} convolutions"
        lines = [
            f"int8          {part_in_int8(self.layers)} ({part}); other layers in {self.dtype}",
            f"measured on   {self.clip}, PSNR against fp32 on the same weights",
            f"{self.bf16:<14}{bf16}",
            f"with int8     {int8}, {loss} than bf16",
        ]
        return "\n".join([*lines, "", *aligned(self._rows())])

    def table(self) -> str:
        """Return the report as a Markdown table of the results, and one of the layers."""
        bf16, int8, loss = self._results()
        share = f"{self.layers.share:.1%} in {len(self.layers.names)} convolutions"
        results = [
            ["decode", "PSNR against fp32", "against bf16", "multiplications in int8"],
            [self.bf16, bf16, "-", "-"],
            [f"int8, {self.dtype}", int8, loss, share],
        ]
        title = f"Precision of a decode, {self.clip}:"
        return "\n".join([title, "", *markdown(results), "", *markdown(self._rows())])

    def record(self) -> dict[str, object]:
        """Return the figures for JSON, which has no infinity."""
        layers = [
            {"name": x.name, "share": x.share, "loss_db": finite(x.loss_db), "int8": x.chosen}
            for x in self.layers.rows
        ]
        return {
            **vars(self.clip),
            "dtype": self.dtype,
            "bf16_psnr_db": finite(self.bf16_db),
            "int8_psnr_db": finite(self.int8_db),
            "loss_db": finite(self.loss_db),
            "int8_share": self.layers.share,
            "layers": layers,
        }

    def _results(self) -> tuple[str, str, str]:
        """Return the PSNR of both decodes, and the loss of int8."""
        loss = f"{abs(self.loss_db):.2f} dB {'less' if self.loss_db >= 0 else 'more'}"
        if math.isnan(self.loss_db):
            loss = "not comparable"
        return _db(self.bf16_db), _db(self.int8_db), loss

    def _rows(self) -> list[list[str]]:
        """Return the cells of the table of the layers, the first row with the headings."""
        rows = [["convolution", "multiplications", "lost alone", "runs in"]]
        for each in self.layers.rows:
            lost = f"{each.loss_db:.2f} dB" if each.loss_db >= 0.005 else "< 0.01 dB"
            runs_in = "int8" if each.chosen else self.dtype
            rows.append([each.name, f"{each.share:.1%}", lost, runs_in])
        return rows


@dataclass(frozen=True)
class BenchmarkReport:
    """All measurements: a comparison per task, notes, and what int8 costs if it was measured."""

    vae: str
    device: str
    clip: Clip
    rounds: int
    comparisons: Sequence[Comparison]
    notes: Sequence[str] = ()
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


def part_in_int8(layers: Int8Layers) -> str:
    """Return the share of `layers` that runs in int8 in words."""
    return f"{layers.share:.0%} of the multiplications"


def dtype_label(dtype: torch.dtype) -> str:
    """Return the short name of `dtype`, such as "bf16"."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


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


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format cells as a Markdown table."""
    cells = padded(rows)
    head, *rest = ["| " + " | ".join(row) + " |" for row in cells]
    return [head, "|" + "|".join("-" * (len(cell) + 2) for cell in cells[0]) + "|", *rest]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format cells as a table with aligned columns."""
    return ["  ".join(row).rstrip() for row in padded(rows)]


def _db(value: float) -> str:
    if math.isnan(value):
        return "not finite"
    return "identical" if math.isinf(value) else f"{value:.2f} dB"
