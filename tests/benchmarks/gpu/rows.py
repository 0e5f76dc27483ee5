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
    # Seconds that it will take, from earlier cases of this run; 0: unknown.
    expected_s: Callable[[], float] = lambda: 0.0

    def row(self, kind: str) -> str:
        """Return the name of the row of `kind`."""
        return f"{self.label}: {kind}"


class Rows:
    """The JSON file of a run. With `head` the file is created, otherwise it is read.

    Every change is written at once, so a crash loses the running row only.
    """

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._now = now
        if head is None:
            self.content = json.loads(path.read_text(encoding="utf-8"))
        else:
            self.content = {**head, "rows": [], "done": [], "running": None}
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

    def is_done(self, section: str) -> bool:
        """Return whether all cases of `section` have run, or making its cases failed."""
        return section in self.content["done"] or self.has(section, "all")

    def finish(self, section: str) -> None:
        """Record that `section` is done, unless the budget was too short for some of its rows."""
        self.content["running"] = None
        if not any(r["section"] == section and r["status"] == "not run" for r in self.rows):
            self.content["done"].append(section)
        self.write()

    def begin(self, section: str, names: Iterable[str]) -> None:
        """Save which rows are measured next, for the process after a crash."""
        self.content["running"] = {"section": section, "names": list(names), "since": self._now()}
        self.write()

    def end(self) -> None:
        """Save that no row is being measured."""
        self.content["running"] = None
        self.write()

    def running_s(self) -> float:
        """Return the seconds since `begin`; 0 if no row is being measured."""
        running = self.content["running"]
        return self._now() - running["since"] if running else 0.0

    def add(self, section: str, name: str, result: Values | Exception) -> None:
        """Add a row to the file and print it."""
        row = {"section": section, "name": name, **outcome(result)}
        self.rows.append({**row, "device": self.content["device"]})
        self.write()
        values = ", ".join(f"{key} {_short(value)}" for key, value in row["values"].items())
        print(f"[{section}] {name}: {values or row['status'] + ', ' + row['reason']}", flush=True)

    def end_running(self, error: Exception) -> None:
        """Add the rows that a process did not finish, with `error` as the reason."""
        running = self.content["running"]
        self.content["running"] = None
        for name in running["names"] if running else ():
            if not self.has(running["section"], name):
                self.add(running["section"], name, error)
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


def _plain(value: Any) -> Any:
    """Round a float to six digits for the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
