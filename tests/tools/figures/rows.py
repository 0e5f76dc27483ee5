"""The committed rows of the benchmarks, from which every figure of the texts is taken."""

import functools
import json
from pathlib import Path
from typing import Any

from fast_video_vae.tests.benchmarks.record import RESULTS

ROOT = Path(__file__).resolve().parents[3]

Row = dict[str, Any]

# Scripts that count, with the same result on every machine.
_COUNTED = ("count_", "compile_")


@functools.cache
def every() -> tuple[Row, ...]:
    """All rows, in the order in which they were measured."""
    return tuple(json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines())


def select(bench: str, case: str = "", **fields: object) -> list[Row]:
    """Return the rows of a benchmark whose case contains `case` and whose fields are equal.

    Of rows with the same case and implementation only the newest, of times for each machine.

    Raises:
        LookupError: There is none.
    """
    wanted = fields | {"bench": bench}
    found = {}
    for row in every():
        if case in row["case"] and all(row.get(key) == value for key, value in wanted.items()):
            machine = "" if bench.startswith(_COUNTED) else row["machine"]
            key = row["case"], machine, row.get("implementation")
            found.pop(key, None)  # the newest goes to the end
            found[key] = row
    if not found:
        raise LookupError(f"no row of {bench} has {case!r} and {fields}")
    return [*found.values()]


def one(bench: str, case: str = "", **fields: object) -> Row:
    """Return the newest row of `select`."""
    return select(bench, case, **fields)[-1]


def by_case(found: list[Row]) -> dict[str, dict[str, Row]]:
    """Group rows by case, and these by implementation."""
    groups: dict[str, dict[str, Row]] = {}
    for row in found:
        groups.setdefault(row["case"], {})[row.get("implementation", "ours")] = row
    return groups
