"""Where the seconds of this pack go on a GPU, in 7.5 minutes: the parts of `gpu_parts.py`.

Each row is printed and saved when it is measured. One process measures and this one watches it: a
case that crashes, hangs or leaves the GPU unusable gets a row with the reason, and a new process
continues with the case after it. Each part has its own time limit. Without CUDA the sizes are tiny,
which only checks that every part runs. README.md next to this file explains the parts.
"""

import argparse
import contextlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_BUNDLE = _HERE.parents[1] / ".gpu"  # of prepare_gpu.py

# Seconds of a case after the end of its part, and of a process before its first case.
_GRACE_S, _START_S = 15, 120

_LOST = 77  # exit status of a process whose GPU no longer works
_BETWEEN = "all"  # stands for a part while none of its cases runs
_HIDDEN = {"why", "taps", "size", "terms", "by", "op", "route", "implementation"}  # in a table


def main() -> None:
    """Watch a process that measures the parts of the command line, or be that process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, default = parser.add_argument, Path("bench-gpu-out") / "rows.jsonl"
    add("--only", nargs="+", metavar="PART", help="such as hopper,conv; default: all but peers")
    add("--peers", action="store_true", help="measure diffusers too: the part peers")
    add("--out", type=Path, default=default, help=f"file of the rows (default: {default})")
    add("--commit", help="commit of this checkout, where git is not installed")
    add("--patience", type=float, default=1.0, help="factor of the time limits")
    add("--parts", type=Path, help="file of other parts: PARTS, as in gpu_parts.py")
    add("--progress", type=Path, help=argparse.SUPPRESS)
    add("--ended", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.progress is not None:
        sys.exit(_measure(args))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run-{time.time():.0f}"
        path.touch()
        command = [sys.executable, __file__, *sys.argv[1:], "--progress", str(path)]
        why = _watch(command, path, _START_S * max(1, args.patience))
    print(f"rows: {args.out}", flush=True)
    sys.exit(why)


def _watch(command: Sequence[str], progress: Path, start_s: float) -> str | None:
    """Run `command` until every case was begun; return why that is not possible."""
    ended: list[str] = []
    while True:
        before = len(_read(progress))
        # Its own group, so that the processes that it started end with it.
        worker = subprocess.Popen([*command, *ended], start_new_session=os.name == "posix")
        until, status = time.time() + start_s, None
        try:
            while status is None and time.time() < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = worker.wait(0.2)
                until = lines[-1]["until"] if len(lines := _read(progress)) > before else until
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            if worker.poll() is None and os.name == "posix":
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.wait()
        if status == 0:
            return None
        if len(_read(progress)) == before:
            return f"the process that measures ended before its first case (status {status})"
        ended = ["--ended", {None: "hung", _LOST: ""}.get(status, f"crashed (status {status})")]


def _read(progress: Path) -> list[dict[str, Any]]:
    """Return the lines of the cases that began and ended; a last one can be incomplete."""
    return [*map(json.loads, progress.read_text(encoding="utf-8").split("\n")[:-1])]


def _measure(args: argparse.Namespace) -> int:
    """Measure the cases that were not begun before, and return the exit status."""
    runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name
    sys.path += [str(_BUNDLE / "packages")] if _BUNDLE.is_dir() else []
    if (_BUNDLE / "comfyui").is_dir() and not os.environ.get("COMFYUI_PATH"):
        os.environ["COMFYUI_PATH"] = str(_BUNDLE / "comfyui")
    from fast_video_vae.tests.benchmarks import gpu_parts

    parts = runpy.run_path(str(args.parts))["PARTS"] if args.parts else gpu_parts.PARTS
    names = chosen(parts, args.only or [each for each in parts if args.peers or each != "peers"])
    bench, lines = gpu_parts.Bench(), _read(args.progress)
    rows = _Rows(args, bench)
    if args.ended and "case" in (last := lines[-1]):
        rows.add(last["part"], last["case"], {"why": args.ended})
        left = last.get("rest", 0) if args.ended == "hung" else last["left"]
        last |= {"left": left, "until": time.time() + _START_S}
        rows.note(**last, done=last["part"] if last["case"] == _BETWEEN else None)
    lines = _read(args.progress)
    for name in (name for name in names if name not in {line.get("done") for line in lines}):
        begun = {line["case"]: line["left"] for line in lines if line.get("part") == name}
        left = [parts[name][0] * args.patience, *begun.values()][-1]
        if not _run(name, parts[name], bench, rows, set(begun), left, _GRACE_S * args.patience):
            return _LOST
    return 0


def chosen(parts: Collection[str], asked: Sequence[str]) -> list[str]:
    """Return the parts with these names or beginnings of names; exit if one is unclear."""
    found = {
        each: [each] if each in parts else [name for name in parts if name.startswith(each)]
        for each in " ".join(asked).replace(",", " ").split()
    }
    if unknown := [each for each, names in found.items() if len(names) != 1]:
        sys.exit(f"part is {', '.join(unknown)}; expected {', '.join(parts)}")
    return [*dict.fromkeys(name for [name] in found.values())]


class _Rows:
    """Prints rows, saves them, and notes which cases began and ended."""

    def __init__(self, args: argparse.Namespace, bench: Any) -> None:
        from fast_video_vae.tests.benchmarks import record

        self._args, self._bench, self._record, self._heading = args, bench, record, []
        small = None if bench.cuda else True
        self._more = {"run": args.progress.name, "commit": args.commit, "small": small}
        lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
        for row in (json.loads(line) for line in lines if args.progress.name in line):
            bench.rows.append({k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})

    def note(self, **line: object) -> None:
        with self._args.progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def add(self, part: str, case: str, values: dict[str, Any]) -> None:
        """Add a row: its values, or `why` there are none."""
        values = {key: each for key, each in values.items() if each is not None}
        for key in (key for key, each in values.items() if isinstance(each, float)):
            values[key] = float(f"{values[key]:.4g}")
        case = case.removesuffix(f": {values.get('implementation')}")
        more = {key: each for key, each in self._more.items() if each is not None}
        self._record.append(self._args.out, "bench_gpu", case, part=part, **more, **values)
        self._bench.rows.append({"part": part, "case": case, **values})
        shown = {key: each for key, each in values.items() if key not in _HIDDEN}
        if shown and self._heading != [part, *shown]:
            self._heading = [part, *shown]
            print(
                f"{'':64}{''.join(f'{key:>{max(11, len(key) + 2)}}' for key in shown)}", flush=True
            )
        cells = (f"{each!s:>{max(11, len(key) + 2)}}" for key, each in shown.items())
        label = f"{case}: {values['implementation']}" if "implementation" in values else case
        print(f"{label:63} {''.join(cells)}{values.get('why', '')}", flush=True)


def _run(
    name: str, part: Any, bench: Any, rows: _Rows, begun: set[str], left: float, grace: float
) -> bool:
    """Measure the cases of a part that were not begun; return whether the GPU works."""
    seconds, cases, about = part
    print(f"\n=== {name}: {about} ({seconds} s)", flush=True)
    bench.until, bench.case_s, late = time.time() + left, math.inf, []
    rows.note(part=name, case=_BETWEEN, left=left, until=bench.until + grace)
    try:
        for case, work in cases(bench):
            left, until = bench.until - time.time(), bench.until + grace
            rest, limit = max(0.0, left - bench.case_s), min(until, time.time() + bench.case_s)
            if case in begun or left <= 0:
                late += [] if case in begun else [case]
                continue
            rows.note(part=name, case=case, left=left, until=limit, rest=rest)
            try:
                values = work()
            except Exception as error:  # whatever a kernel, a driver or a peer raises
                values = {"why": bench.reason(error.with_traceback(None))}
            rows.add(name, case, values)
            rows.note(part=name, case=_BETWEEN, left=bench.until - time.time(), until=until)
            if not bench.works():
                return False
    except Exception as error:  # the part does not know its cases
        rows.add(name, _BETWEEN, {"why": bench.reason(error)})
    if late:
        rows.add(name, f"{len(late)} cases", {"why": f"no time left for {', '.join(late[:4])}"})
    rows.note(done=name, until=time.time() + _START_S)
    return True


if __name__ == "__main__":
    main()
