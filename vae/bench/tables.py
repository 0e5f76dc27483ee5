"""Text of a report: tables, names of dtypes, and numbers for JSON."""

import math
from collections.abc import Sequence

import torch

from ...kernels import padded

# Short names of dtypes, as in the command line and the nodes.
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format cells as a Markdown table."""
    cells = padded(rows)
    head, *rest = ["| " + " | ".join(row) + " |" for row in cells]
    return [head, "|" + "|".join("-" * (len(cell) + 2) for cell in cells[0]) + "|", *rest]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format cells as a table with aligned columns."""
    return ["  ".join(row).rstrip() for row in padded(rows)]


def dtype_label(dtype: torch.dtype) -> str:
    """Return the short name of `dtype`, such as "bf16"."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def finite(value: float | None) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return None if value is None or not math.isfinite(value) else value
