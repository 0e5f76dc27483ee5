"""The table of ops and backends as text, for `fast-video-vae info --backends` and the README."""

import textwrap
from collections.abc import Iterable, Sequence

import torch

from ...kernels import Support, backend_matrix, native_library

# Columns of a terminal that the text keeps to.
WIDTH = 100

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

LEGEND = "exact: the bits of the reference; fast: rounded otherwise"


def backend_report() -> str:
    """What the backends of this machine do, and what they have to do it with.

    The compiled library of the CPU is built if it is not there.

    Returns:
        Many lines, the first of them a table for each kind of device.
    """
    library = native_library()
    matrix = backend_matrix()
    rows, reasons = table(matrix)
    lines = []
    for device in dict.fromkeys(each.device for each in matrix):
        mine = [0, *(n for n, head in enumerate(rows[0]) if head.startswith(f"{device} "))]
        lines += [*aligned([[row[n] for n in mine] for row in rows]), ""]
    lines += wrapped("", LEGEND)
    for number, reason in enumerate(reasons, 1):
        lines += wrapped(f"({number}) ", reason)
    threads = torch.get_num_threads()
    machine = {
        "torch": torch.__version__,
        "CPU": f"{torch.backends.cpu.get_cpu_capability()}, {threads} threads"
        + (f"; native uses {library.instructions}" if library.instructions else ""),
        "CUDA": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "library": str(library.path or "none"),
        "missing": library.missing or "nothing",
    }
    lines.append("")
    for name, value in machine.items():
        lines += wrapped(f"{name:<10}", value)
    return "\n".join(lines)


def table(matrix: Sequence[Support]) -> tuple[list[list[str]], list[str]]:
    """Put what the backends say into cells.

    A cell is "exact", "fast" or "no (2)", where the number is that of a reason. Where the dtypes
    differ, it says so for each kind: "exact bf16 fp16, fast fp32".

    Args:
        matrix: From `backend_matrix`.

    Returns:
        Rows of cells, the first one the headings; and the distinct reasons.
    """
    columns = list(dict.fromkeys((each.device, each.backend) for each in matrix))
    reasons = list(dict.fromkeys(each.reason for each in matrix if each.reason is not None))
    rows = [["op", *(f"{device} {backend}" for device, backend in columns)]]
    for op in dict.fromkeys(each.op for each in matrix):
        cells = [
            _cell([m for m in matrix if (m.op, m.device, m.backend) == (op, *column)], reasons)
            for column in columns
        ]
        rows.append([op, *cells])
    return rows, reasons


def aligned(rows: Sequence[Sequence[str]], gap: int = 2) -> list[str]:
    """Rows of cells as lines with straight columns."""
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    return [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def wrapped(label: str, text: str) -> list[str]:
    """A label and its text, which goes on below itself where it is long."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(entries: Iterable[Support], reasons: Sequence[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for each in entries:
        name = str(each.dtype).removeprefix("torch.")
        kinds.setdefault(_kind(each, reasons), []).append(_SHORT.get(name, name))
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} {' '.join(dtypes)}" for kind, dtypes in kinds.items())


def _kind(each: Support, reasons: Sequence[str]) -> str:
    if each.reason is not None:
        return f"no ({reasons.index(each.reason) + 1})"
    return "exact" if each.exact else "fast"
