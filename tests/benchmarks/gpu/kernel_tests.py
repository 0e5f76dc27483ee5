"""Section `tests`: the tests of the kernels on this device, counted, with the failing names.

pytest runs in a process of its own, because a faulty kernel makes the GPU of its process unusable.
"""

import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .rows import Case, Missing, Results
from .session import Session

_ROOT = Path(__file__).resolve().parents[3]
_KIND = "pytest"

# The most important files first, in case the time is too short for all.
_KERNELS = (
    "tests/kernels/test_ops.py", "tests/kernels/test_triton.py", "tests/kernels/test_attention.py",
    "tests/kernels",
)  # fmt: skip
_SMALL = ("tests/kernels/test_messages.py",)

# Seconds for the tests of the kernels, and for those of the VAE that need a GPU.
_KERNELS_S = 120
_VAE_S = 45

# Seconds for pytest to end and to report what failed until then.
_ENDS_S = 10

# Triton's compilation takes most of the time, in one process per core.
_PROCESSES = 8

_RESULT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_TEST = re.compile(r"\S+\.py::\S.*?(?=\s+(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b|$)")
_FAILS = ("FAILED", "ERROR", "XPASS")
_SHOWN = 6


def cases(session: Session) -> list[Case]:
    """Return the tests of the kernels, and those of the VAE that need a GPU."""
    kernels = session.pick(_KERNELS, _SMALL)
    marked = ("tests/vae", "-m", "gpu")
    run = functools.partial(_run, session)
    return [
        Case("tests/kernels", (_KIND,), functools.partial(run, "kernels", kernels, _KERNELS_S)),
        Case("tests/vae, marker gpu", (_KIND,), functools.partial(run, "vae", marked, _VAE_S)),
    ]


def results(lines: Iterable[str]) -> dict[str, str]:
    """Return the results by test of the lines that `pytest -v` or pytest-xdist prints."""
    found = {}
    for line in lines:
        test, result = _TEST.search(line), _RESULT.search(line)
        if test and result:
            found[test[0].rstrip()] = result[0]
    return found


def summary(found: dict[str, str]) -> dict[str, object]:
    """Return the values of the row: counts, and the first names that failed."""
    counts = Counter(found.values())
    failing = [test.rpartition("/")[2] for test, result in found.items() if result in _FAILS]
    more = f" and {len(failing) - _SHOWN} others" if len(failing) > _SHOWN else ""
    return {
        "passed": counts["PASSED"],
        "failed": len(failing),
        "skipped": counts["SKIPPED"] + counts["XFAIL"],
        "failing": "; ".join(failing[:_SHOWN]) + more if failing else None,
    }


def _run(session: Session, name: str, selected: Sequence[str], seconds: float) -> Results:
    if "-m" in selected and not session.cuda:
        raise Missing("needs a CUDA device")
    if importlib.util.find_spec("pytest") is None:
        raise Missing("pytest is not installed")
    path = (session.path or Path(f"tests-{name}.json")).with_suffix(f".tests-{name}.txt")
    limit_s = min(seconds, session.clock.left())
    with path.open("w", encoding="utf-8") as log:
        status = _finished(_command(selected), limit_s, log.fileno())
    found = results(path.read_text(encoding="utf-8", errors="replace").splitlines())
    if not found and status != 5:  # 5: no test was selected
        raise RuntimeError(f"pytest ended with status {status} before a test; see {path.name}")
    ended = "all" if status is not None else f"stopped after {limit_s:.0f} s"
    yield _KIND, {**summary(found), "ended": ended}


def _command(selected: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", *selected, "-v", "-rN", "--tb=short"]
    # Without the options of pyproject.toml: its number of processes, and its failing warnings.
    command += ["-o", "addopts=", "-W", "default", "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None and len(selected) > 1:
        command += ["-n", str(max(1, min(_PROCESSES, (os.cpu_count() or 2) // 2)))]
    return command if "-m" in selected else [*command, "-m", "not slow"]


def _finished(command: Sequence[str], limit_s: float, output: int) -> int | None:
    """Return the exit status; None if the tests were stopped after `limit_s`."""
    process = subprocess.Popen(command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None
