"""All GPU measurements in one command: tests, profile, convolutions, whole clips, users' memory.

`python tests/benchmarks/bench_gpu.py` takes 25 minutes on a GPU, what decides most first. It prints
each row when it is done and all tables at the end, and saves each row at once in a JSON file, and
the tables in a text file. It needs torch, triton and this pack; diffusers and ComfyUI are measured
too where they are installed, or where `prepare_gpu.py` has bundled them.

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
import sys
import tempfile
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parent / "conftest.py"))  # binds the checkout to its import name

import torch  # noqa: E402

from fast_video_vae.tests.benchmarks import record  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu import bundle, machine, table  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.clock import Clock  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.rows import Rows  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.schedule import run_sections  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.sections import SECTIONS  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.session import Session  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.supervise import GPU_LOST, supervise  # noqa: E402
from fast_video_vae.tests.benchmarks.gpu.turns import free  # noqa: E402

# Seconds of a run. A small run has no limit and no check for hanging cases: its rows must not fail
# on a busy machine, and the first case may build the CPU kernels.
_BUDGET_S = sum(section.seconds for section in SECTIONS.values())


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
    supervise(_command(args, until), args.path, args.only, until)
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
    default = f"default: {_BUDGET_S:.0f}; small runs: no limit"
    add("--only", nargs="+", choices=sections, default=sections)
    add("--budget", type=float, help=f"seconds after which no row starts; {default}")
    add("--continue", dest="resume", action="store_true", help=kept)
    add("--json", type=Path, help="file of the rows (default: gpu-NAME.json next to this file)")
    add("--out", type=Path, help="append the rows of `vae` to this results.jsonl too")
    add("--commit", help="commit of this checkout, where git is not installed")
    add("--bundle", type=Path, default=bundle.FOLDER, help="folder that prepare_gpu.py has made")
    add("--small", action="store_true", default=no_gpu, help="tiny sizes; always without CUDA")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.budget is None:
        args.budget = math.inf if args.small else _BUDGET_S
    args.only = [name for name in sections if name in args.only]
    return args


def _command(args: argparse.Namespace, until: float) -> list[str]:
    """Return the command of the process that measures."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    command += ["--json", str(args.path), "--only", *args.only, "--until", str(until)]
    command += ["--bundle", str(args.bundle), *(["--small"] if args.small else [])]
    return command + (["--commit", args.commit] if args.commit else [])


def _work(args: argparse.Namespace) -> int:
    """Measure the rows that the file lacks, and return the exit status."""
    bundle.use(args.bundle)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    elif args.small:
        torch.set_num_threads(1)  # a second thread slows tiny tensors down
    rows = Rows(args.path)
    rows.content["machine"] = machine.describe(device, args.commit)
    rows.write()
    clock = Clock(args.until)
    session = Session(device, small=args.small, clock=clock, path=args.path)
    sections = [SECTIONS[name] for name in args.only]
    for _ in run_sections(rows, clock, sections, session):
        if not _serves(device):
            return GPU_LOST
        free(device)
        gc.freeze()  # keeps later garbage collections short
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
