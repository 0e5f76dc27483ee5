"""Numbers and text of a report: differences, tables, names of dtypes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import padded

# Short names of dtypes, as in the command line and the nodes.
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def psnr(images: Tensor, expected: Tensor) -> float:
    """Compute the PSNR of `[..., T, H, W, C]` in [0, 1] in dB, summed in float64 per frame."""
    error, count = 0.0, 0
    # On the host, because some devices lack float64; a frame at a time, without a copy of all.
    for one, other in zip(images.flatten(0, -4), expected.flatten(0, -4), strict=True):
        difference = one.cpu().double() - other.cpu().double()
        error += float(difference.square_().sum())
        count += difference.numel()
    if error == 0:
        return math.inf
    return math.nan if not math.isfinite(error) else 10 * math.log10(count / error)


def relative_error(latent: Tensor, expected: Tensor) -> float:
    """Return the norm of `latent - expected` over that of `expected`, both `[...]`, in float64."""
    one, other = latent.cpu().double(), expected.cpu().double()
    norm, difference = float(other.norm()), float((one - other).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


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
