"""All GPU measurements in one command: limits, ops, convolutions, whole clips, ablations.

`python tests/benchmarks/bench_gpu.py` takes some minutes on a GPU. It prints each row when it is
done and all tables at the end, and saves the rows in a JSON file, updated after each case, and the
tables in a text file. It needs torch, triton and this pack; diffusers and a ComfyUI checkout are
measured too where they are installed.

The rows are measured in a second process. If it crashes, or a faulty kernel makes its GPU unusable,
another process continues with the next row. At the end of the budget it is stopped, and the tables
are printed.
Without CUDA the sizes are tiny, which only checks that every row runs.
"""

import argparse
import contextlib
import gc
import math
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

import torch  # noqa: E402

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu import (  # noqa: E402
    ablation,
    attention,
    conv,
    host,
    limits,
    lora,
    machine,
    ops,
    plans,
    table,
    vae,
)
from fast_video_vae.tests.benchmarks.gpu.rows import Clock, NotRun, Rows, run_section  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.session import Session  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.turns import free  # noqa: E402

# In the order of the run, most important first, with the largest share of the budget for each.
SECTIONS = {
    "copy": (limits.cases, 0.05),
    "ops": (ops.cases, 0.2),
    "vae": (vae.cases, 0.45),
    "ablation": (ablation.cases, 0.2),
    "attention": (attention.cases, 0.05),
    "conv": (conv.cases, 0.15),
    "host": (host.cases, 0.1),
    "plans": (plans.cases, 0.1),
    "lora": (lora.cases, 0.1),
}

# Seconds of a run. A small run has no limit and no check for hanging cases: its rows must not fail
# on a busy machine, and the first case may build the CPU kernels.
_BUDGET_S = 520

# Seconds after the budget at which the running row is stopped.
_GRACE_S = 40

# Seconds after which a case counts as hanging: the longest decodes 1088x1920x81 twice with each
# implementation.
_HANGS_S = 200

# Crashes after which the remaining rows are skipped.
_DEATHS = 12

# Exit status of a process whose GPU no longer works.
_GPU_LOST = 77


def main() -> None:
    """Run the sections that the command line names."""
    args = _arguments()
    args.path = args.json or _default_path(args.small)
    if args.worker:
        sys.exit(_work(args))
    until = time.time() + args.budget
    args.path.parent.mkdir(parents=True, exist_ok=True)
    if args.resume and args.path.exists():
        Rows(args.path).forget_not_run(args.only)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        Rows(args.path, {"machine": {}, "device": device, "small": args.small})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # print the tables then too
    _supervise(args, until)
    content = Rows(args.path).content
    for row in content["rows"] if args.out else ():
        if row["section"] == "vae" and row["status"] == "ok":
            case, _, name = row["name"].rpartition(": ")
            record.append(args.out, "bench_gpu", case, implementation=name, **row["values"])
    text = table.report(content)
    tables = args.path.with_suffix(".txt")
    tables.write_text(text + "\n", encoding="utf-8")
    print(f"\nrows: {args.path}\ntables: {tables}", flush=True)
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, sections = parser.add_argument, list(SECTIONS)
    no_gpu = not torch.cuda.is_available()
    kept = "keep the rows of the file and measure those that were not run"
    default = "default: 520; small runs: no limit"
    add("--only", nargs="+", choices=sections, default=sections)
    add("--budget", type=float, help=f"seconds after which no row starts; {default}")
    add("--continue", dest="resume", action="store_true", help=kept)
    add("--json", type=Path, help="file of the rows (default: gpu-NAME.json next to this file)")
    add("--out", type=Path, help="append the rows of `vae` to this results.jsonl too")
    add("--commit", help="commit of this checkout, where git is not installed")
    add("--small", action="store_true", default=no_gpu, help="tiny sizes; always without CUDA")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.budget is None:
        args.budget = math.inf if args.small else _BUDGET_S
    return args


def _supervise(args: argparse.Namespace, until: float) -> None:
    """Measure the rows in a process, and start another one when it crashes."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    command += ["--json", str(args.path), "--only", *args.only, "--until", str(until)]
    command += ["--budget", str(args.budget), *(["--small"] if args.small else [])]
    command += ["--commit", args.commit] if args.commit else []
    for _ in range(_DEATHS):
        worker = subprocess.Popen(command)
        try:
            status = _watch(worker, args.path, until + _GRACE_S)
        except (TimeoutError, KeyboardInterrupt):
            worker.kill()
            worker.wait()
            Rows(args.path).end_running(NotRun("stopped at the end of the budget"))
            break
        if status == 0:
            return
        if status != _GPU_LOST:  # the rows have the reason in that case
            Rows(args.path).end_running(
                RuntimeError(f"the process crashed or hung in this row (status {status})")
            )
    rows = Rows(args.path)
    there = {row["section"] for row in rows.rows}
    for section in args.only:
        if section not in there:
            rows.begin(section, ["all"])
            rows.end_running(NotRun("the run ended before this section"))


def _watch(worker: "subprocess.Popen[bytes]", path: Path, end: float) -> int:
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
            worker.kill()
            return worker.wait()


def _work(args: argparse.Namespace) -> int:
    """Measure the rows that the file lacks, and return the exit status."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif args.small:
        torch.set_num_threads(1)  # a second thread slows tiny tensors down
    rows = Rows(args.path)
    rows.content["machine"] = machine.describe(device, args.commit)
    rows.write()
    clock = Clock(args.until)
    session = Session(device, small=args.small, clock=clock)
    shares = sum(SECTIONS[name][1] for name in args.only)
    for name in args.only:
        if rows.has(name, "all"):  # creating its cases failed before
            continue
        make, share = SECTIONS[name]
        clock.section_until = time.time() + args.budget * max(share, share / shares)
        rows.begin(name, ["all"])  # in case creating the cases fails
        cases = make(session)
        for _ in run_section(rows, clock, name, cases, device.type):
            if not _serves(device):
                return _GPU_LOST
            free(device)
            gc.freeze()  # keeps later garbage collections short
        rows.content["running"] = None
        rows.write()
    gc.unfreeze()
    return 0


def _serves(device: torch.device) -> bool:
    """Return whether the device works: after a faulty kernel every later call fails."""
    if device.type != "cuda":
        return True
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).sum() == 1)
    return False


def _default_path(small: bool) -> Path:
    """Return a path with the GPU's name, read from the driver so that no GPU memory is used."""
    if small:
        return Path(tempfile.gettempdir()) / "bench-gpu-small.json"
    name = machine.asked("name") or record.machine()
    return _HERE / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


if __name__ == "__main__":
    main()
