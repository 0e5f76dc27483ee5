"""A second process measures the rows, and another one continues after a crash."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from .rows import NotRun, Rows

# Exit status of a process whose GPU no longer works.
GPU_LOST = 77

# Seconds after the budget at which the running row is stopped.
_GRACE_S = 40

# Seconds after which a case counts as hanging: the longest decodes 1088x1920x81 twice with each
# implementation.
_HANGS_S = 200

# Crashes after which the remaining rows are skipped.
_DEATHS = 12

_Process = subprocess.Popen  # of bytes


def supervise(command: Sequence[str], path: Path, sections: Sequence[str], until: float) -> None:
    """Measure the rows in a process, and start another one when it crashes.

    Args:
        command: Command of the process; it writes the rows that the file lacks.
        path: The file of the rows.
        sections: Names of the sections; those without a row get one with the reason.
        until: End of the run in seconds of `time.time()`.
    """
    for _ in range(_DEATHS):
        # Its own group, so that the processes that it started end with it.
        worker = subprocess.Popen(command, start_new_session=os.name == "posix")
        try:
            status = _watch(worker, path, until + _GRACE_S)
        except (TimeoutError, KeyboardInterrupt):
            _end(worker)
            Rows(path).end_running(NotRun("stopped at the end of the budget"))
            break
        if status == 0:
            return
        if status != GPU_LOST:  # the rows have the reason in that case
            Rows(path).end_running(
                RuntimeError(f"the process crashed or hung in this row (status {status})")
            )
    rows = Rows(path)
    there = {row["section"] for row in rows.rows}
    for section in sections:
        if section not in there:
            rows.add(section, "all", NotRun("the run ended before this section"))


def _watch(worker: _Process, path: Path, end: float) -> int:
    """Return the exit status of `worker`, which is killed when a row hangs.

    Raises:
        TimeoutError: `end` has passed.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return worker.wait(0.5)
        if time.time() > end:
            raise TimeoutError
        if math.isfinite(end) and Rows(path).running_s() > _HANGS_S:
            return _end(worker)


def _end(worker: _Process) -> int:
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    return worker.wait()
