"""Everything that a GPU is asked, in one command: limits, ops, convolutions, whole clips, changes.

`python tests/benchmarks/bench_gpu.py` takes some minutes on a GPU, prints each row when it is done
and all tables at the end, keeps the rows in a JSON file from the first on, and the tables in a text
file beside it. It needs torch, triton and this pack; diffusers and a ComfyUI checkout are measured
beside it where they are.

The measuring is done by a second process. Should it crash, or lose its GPU to a bad kernel, a next
one goes on behind the row that it died in; when the time is over it is stopped, and the tables are
printed all the same. Without CUDA the sizes are tiny: that shows that the rows run, no more.
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

# In the order of the run, what matters most first, with the share of the time that each may take.
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

# Seconds that a run takes. A small one has no limit, nor can one of its cases hang: how busy the
# machine is says nothing of the rows, and the first case may build the kernels of the CPU.
_BUDGET_S = 520

# Seconds after the budget at which a row that still runs is stopped.
_GRACE_S = 40

# Seconds after which a case hangs: the longest decodes 1088x1920x81 twice over with everybody.
_HANGS_S = 200

# How often a process may die before the rest is left.
_DEATHS = 12

# What a process exits with whose GPU does nothing any more.
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who ends it sees the tables too
    _supervise(args, until)
    content = Rows(args.path).content
    for row in content["rows"] if args.out else ():
        if row["section"] == "vae" and row["status"] == "ok":
            case, _, name = row["name"].rpartition(": ")
            record.append(args.out, "bench_gpu", case, implementation=name, **row["values"])
    text = table.report(content)
    told = args.path.with_suffix(".txt")
    told.write_text(text + "\n", encoding="utf-8")
    print(f"\nrows: {args.path}\ntables: {told}", flush=True)
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, sections = parser.add_argument, list(SECTIONS)
    no_gpu = not torch.cuda.is_available()
    kept = "keep the rows of the file, but for those that were not run"
    default = "default: 520, for a small run no limit"
    add("--only", nargs="+", choices=sections, default=sections)
    add("--budget", type=float, help=f"seconds after which no row begins; {default}")
    add("--continue", dest="resume", action="store_true", help=kept)
    add("--json", type=Path, help="where the rows go (default: gpu-NAME.json beside this file)")
    add("--out", type=Path, help="a results.jsonl that gets the rows of `vae` too")
    add("--commit", help="of this checkout, where git is not there to be asked")
    add("--small", action="store_true", default=no_gpu, help="tiny sizes; always without CUDA")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.budget is None:
        args.budget = math.inf if args.small else _BUDGET_S
    return args


def _supervise(args: argparse.Namespace, until: float) -> None:
    """Have the rows measured by a process, and by a next one as often as it dies."""
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
            Rows(args.path).end_running(NotRun("it was stopped: the time was over"))
            break
        if status == 0:
            return
        if status != _GPU_LOST:  # there the rows say it themselves
            Rows(args.path).end_running(
                RuntimeError(f"the process died of it, or hung (status {status})")
            )
    rows = Rows(args.path)
    there = {row["section"] for row in rows.rows}
    for section in args.only:
        if section not in there:
            rows.begin(section, ["all"])
            rows.end_running(NotRun("the run ended before it"))


def _watch(worker: "subprocess.Popen[bytes]", path: Path, end: float) -> int:
    """The exit status of a process, which is ended where a row hangs.

    Raises:
        TimeoutError: The time is over.
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
    """Measure the rows that are not there yet, and give the exit status."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif args.small:
        torch.set_num_threads(1)  # for tiny tensors a second one costs more than it does
    rows = Rows(args.path)
    rows.content["machine"] = machine.describe(device, args.commit)
    rows.write()
    clock = Clock(args.until)
    session = Session(device, small=args.small, clock=clock)
    shares = sum(SECTIONS[name][1] for name in args.only)
    for name in args.only:
        if rows.has(name, "all"):  # its cases cannot even be made
            continue
        make, share = SECTIONS[name]
        clock.section_until = time.time() + args.budget * max(share, share / shares)
        rows.begin(name, ["all"])  # should what the cases need be what does not work
        cases = make(session)
        for _ in run_section(rows, clock, name, cases, device.type):
            if not _serves(device):
                return _GPU_LOST
            free(device)
            gc.freeze()  # what is there between two cases stays; later collections pass it by
        rows.content["running"] = None
        rows.write()
    gc.unfreeze()
    return 0


def _serves(device: torch.device) -> bool:
    """Whether the device still does something: a bad kernel leaves a process without it."""
    if device.type != "cuda":
        return True
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).sum() == 1)
    return False


def _default_path(small: bool) -> Path:
    """Named after the GPU. The driver is asked for it: this process takes no memory there."""
    if small:
        return Path(tempfile.gettempdir()) / "bench-gpu-small.json"
    name = machine.asked("name") or record.machine()
    return _HERE / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


if __name__ == "__main__":
    main()
