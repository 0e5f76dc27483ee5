"""What int8 costs with the weights of a VAE, as lines, tables and JSON."""

import math
from dataclasses import dataclass

import torch

from ..streaming.int8.layers import Int8Layers
from .content import Clip
from .tables import aligned, dtype_label, finite, markdown


@dataclass(frozen=True)
class PrecisionReport:
    """A decode in bfloat16 and one with int8, each against float32 on the same weights."""

    clip: Clip
    dtype: torch.dtype  # of the layers that are not in int8
    bf16_dtype: torch.dtype  # float32 on a CPU whose convolutions in bfloat16 are slow
    bf16_db: float  # PSNR against float32; infinite if equal
    int8_db: float
    layers: Int8Layers

    @property
    def loss_db(self) -> float:
        """Decibels that int8 has less than bfloat16; negative where it has more."""
        return 0.0 if self.int8_db == self.bf16_db else self.bf16_db - self.int8_db

    def part(self) -> str:
        """Return how much of the VAE runs in int8, such as "81 % of the multiplications"."""
        count, rows = len(self.layers.names), len(self.layers.rows)
        return f"{part_in_int8(self.layers)} ({count} of {rows} convolutions)"

    def text(self) -> str:
        """Return the report as lines and a table with aligned columns."""
        rows = [
            ("int8", f"{self.part()}; other layers in {dtype_label(self.dtype)}"),
            ("measured on", f"{self.clip}, PSNR against fp32 on the same weights"),
            (self._bf16_name(), _db(self.bf16_db)),
            ("with int8", f"{_db(self.int8_db)}, {self._loss()} than bf16"),
        ]
        lines = [f"{name:<14}{value}" for name, value in rows]
        return "\n".join([*lines, "", *aligned(self.rows())])

    def table(self) -> str:
        """Return the report as a Markdown table of the results, and one of the layers."""
        head = ["decode", "PSNR against fp32", "against bf16", "multiplications in int8"]
        share = f"{self.layers.share:.1%} in {len(self.layers.names)} convolutions"
        results = [
            head,
            [self._bf16_name(), _db(self.bf16_db), "-", "-"],
            [f"int8, {dtype_label(self.dtype)}", _db(self.int8_db), self._loss(), share],
        ]
        title = f"Precision of a decode, {self.clip}:"
        return "\n".join([title, "", *markdown(results), "", *markdown(self.rows())])

    def rows(self) -> list[list[str]]:
        """Return the cells of the table of the layers, the first row with the headings."""
        rows = [["convolution", "multiplications", "lost alone", "runs in"]]
        other = dtype_label(self.dtype)
        for each in self.layers.rows:
            lost = f"{each.loss_db:.2f} dB" if each.loss_db >= 0.005 else "< 0.01 dB"
            chosen = "int8" if each.chosen else other
            rows.append([each.name, f"{each.share:.1%}", lost, chosen])
        return rows

    def record(self) -> dict[str, object]:
        """Return the figures for JSON, which has no infinity."""
        return {
            **vars(self.clip),
            "dtype": dtype_label(self.dtype),
            "bf16_psnr_db": finite(self.bf16_db),
            "int8_psnr_db": finite(self.int8_db),
            "loss_db": finite(self.loss_db),
            "int8_share": self.layers.share,
            "layers": [
                {
                    "name": each.name,
                    "share": each.share,
                    "loss_db": finite(each.loss_db),
                    "int8": each.chosen,
                }
                for each in self.layers.rows
            ],
        }

    def _bf16_name(self) -> str:
        computed = "" if self.bf16_dtype == torch.bfloat16 else " in fp32"
        return f"bf16{computed}"

    def _loss(self) -> str:
        if math.isnan(self.loss_db):
            return "not comparable"
        return f"{abs(self.loss_db):.2f} dB {'less' if self.loss_db >= 0 else 'more'}"


def part_in_int8(layers: Int8Layers) -> str:
    """Return the share of `layers` that runs in int8 in words."""
    return f"{layers.share:.0%} of the multiplications"


def _db(value: float) -> str:
    if math.isnan(value):
        return "not finite"
    return "identical" if math.isinf(value) else f"{value:.2f} dB"
