"""The check of a device as a table and a text to post."""

import torch

from ...kernels import checked_kernels, device_name, environment
from ..streaming.precision import fastest_decode_dtype
from ..streaming.prepared.device_check import Row, judged, rows, verdicts_of
from .report import aligned, dtype_label


def check_device(device: torch.device) -> str:
    """Check a device now; return a table of the errors by case and dtype, and what is wrong."""
    dtypes = dict.fromkeys((torch.float32, fastest_decode_dtype(device)))
    if device.type != "cpu":
        dtypes[torch.float16] = None
    found = {dtype: list(rows(device, dtype)) for dtype in dtypes}
    table = [["largest error of 256 values", *(f"{dtype_label(d)} (allowed)" for d in dtypes)]]
    for each in zip(*found.values(), strict=True):
        table.append([each[0].case.name, *map(_cell, each)])
    lines = [environment(device), "", *aligned(table), ""]
    for dtype, results in found.items():
        verdict, label = judged(results, device, dtype), dtype_label(dtype)
        lines.append(f"{label}: {verdict.text or 'all right'}")
        lines += [f"  with {words}: {fault or 'right'}" for words, fault in verdict.tried]
    kernels = checked_kernels(device)
    wrong = [name for name, is_right in kernels.items() if not is_right]
    if kernels:
        lines.append(f"kernels: {len(kernels) - len(wrong)} of {len(kernels)} checked ones serve")
    return "\n".join(lines + [f"  not used: {name}" for name in wrong])


def device_notes(device: torch.device) -> list[str]:
    """Return what is known of a device, a line for each dtype whose check has ended."""
    right = f"checked: {device_name(device)} computes stored examples rightly in"
    known = verdicts_of(device).items()
    return [verdict.text or f"{right} {dtype_label(dtype)}" for dtype, verdict in known]


def _cell(row: Row) -> str:
    error = 100 * row.error
    shown = "< 0.0001" if 0 < error < 1e-4 else f"{error:.2g}"
    cell = f"{shown} % ({100 * row.bound:g} %)"
    return cell if row.is_right else f"WRONG: {row.reason or cell}"
