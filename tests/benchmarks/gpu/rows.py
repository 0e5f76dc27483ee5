"""The rows of a run, saved in a file: each has values, or the reason why it has none."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.benchmarks.peers import PeerUnavailableError

Values = Mapping[str, Any]

# Kind of each row, with its values or with the exception that explains why it has none.
Results = Iterator[tuple[str, Values | Exception]]


class Missing(Exception):  # noqa: N818, an answer, not an error
    """The subject of a row is not on this machine; the message names it."""


class NotRun(Exception):  # noqa: N818, an answer, not an error
    """The budget is too short for a row; the message has the expected time."""


# Status of a row by exception; any other is `failed`.
_STATUSES = {
    Missing: "missing",
    PeerUnavailableError: "missing",
    Refusal: "refused",
    NotRun: "not run",
}


@dataclass(frozen=True)
class Case:
    """Rows that are measured together, one for each of `kinds`.

    An exception of `run` is recorded in the rows of all kinds that it has not yielded.
    """

    label: str
    kinds: tuple[str, ...]
    run: Callable[[], Results]

    def row(self, kind: str) -> str:
        """Return the name of the row of `kind`."""
        return f"{self.label}: {kind}"


class Rows:
    """The JSON file of a run. With `head` the file is created, otherwise it is read."""

    def __init__(self, path: Path, head: Mapping[str, Any] | None = None) -> None:
        self.path = path
        if head is None:
            self.content = json.loads(path.read_text(encoding="utf-8"))
        else:
            self.content = {**head, "rows": [], "running": None}
            self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def forget_not_run(self, sections: Iterable[str]) -> None:
        """Drop the rows of `sections` with the status `not run`, so that they are run again."""
        again = set(sections)
        self.content["rows"] = [
            row for row in self.rows if row["status"] != "not run" or row["section"] not in again
        ]
        self.content["running"] = None
        self.write()

    def has(self, section: str, name: str) -> bool:
        return any((row["section"], row["name"]) == (section, name) for row in self.rows)

    def begin(self, section: str, names: Iterable[str]) -> None:
        """Save which rows are measured next, for the process after a crash."""
        self.content["running"] = {"section": section, "names": list(names), "since": time.time()}
        self.write()

    def running_s(self) -> float:
        """Return the seconds since `begin`; 0 if no row is being measured."""
        running = self.content["running"]
        return time.time() - running["since"] if running else 0.0

    def add(self, section: str, name: str, result: Values | Exception, device: str) -> None:
        """Add a row and print it."""
        row = {"section": section, "name": name, **outcome(result), "device": device}
        self.rows.append(row)
        values = ", ".join(f"{key} {_short(value)}" for key, value in row["values"].items())
        print(f"[{section}] {name}: {values or row['status'] + ', ' + row['reason']}", flush=True)

    def end_running(self, error: Exception) -> None:
        """Add the rows that a process did not finish, with `error` as the reason."""
        running = self.content["running"]
        self.content["running"] = None
        for name in running["names"] if running else ():
            if not self.has(running["section"], name):
                self.add(running["section"], name, error, self.content["device"])
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
        draft.replace(self.path)


def outcome(result: Values | Exception) -> dict[str, Any]:
    """Return status, reason and values of a row."""
    if not isinstance(result, Exception):
        values = {key: _plain(value) for key, value in result.items() if value is not None}
        return {"status": "ok", "reason": "", "values": values}
    status = _STATUSES.get(type(result), "failed")
    text = " ".join(str(result).split())[:300]
    reason = text if status != "failed" else f"{type(result).__name__}: {text}"
    return {"status": status, "reason": reason, "values": {}}


@dataclass
class Clock:
    """The time limits of a run, in seconds of `time.time()`."""

    until: float  # the end of the run
    section_until: float = math.inf  # the end of the current section's share

    def left(self) -> float:
        return min(self.until, self.section_until) - time.time()


def run_section(
    rows: Rows, clock: Clock, section: str, cases: Iterable[Case], device: str
) -> Iterator[str]:
    """Run the cases of a section that the file lacks; yield the label after each."""
    for case in cases:
        missing = [name for name in map(case.row, case.kinds) if not rows.has(section, name)]
        if not missing:
            continue
        rows.begin(section, missing)
        for kind, result in _results(case, clock):
            name = case.row(kind)
            if name in missing:
                missing.remove(name)
                rows.add(section, name, result, device)
        rows.content["running"] = None
        rows.write()
        yield case.label


def _results(case: Case, clock: Clock) -> Results:
    error: Exception = RuntimeError("the case yielded no such row")
    if clock.left() <= 0:
        budget = "run" if clock.until <= clock.section_until else "section"
        error = NotRun(f"the budget of the {budget} was used up")
    else:
        try:
            yield from case.run()
        except Exception as caught:  # whatever a kernel, a driver or a peer raises
            error = caught
    yield from ((kind, error) for kind in case.kinds)


def _plain(value: Any) -> Any:
    """Round a float to six digits for the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
