"""The frame of the benchmarks: arguments, runs that are timed in turn, and JSON rows of results."""

import argparse
import datetime
import gc
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fast_video_vae.kernels import synchronize

RESULTS = Path(__file__).with_name("results.jsonl")
LOOK = {"level": logging.INFO, "format": "%(message)s", "stream": sys.stdout, "force": True}


def parser(doc: str, **defaults: object) -> argparse.ArgumentParser:
    """Log to stdout, and return a parser with the description `doc`, `--out` and more options.

    A default that is a list is one of several values, one that is None a number, False a flag.
    """
    logging.basicConfig(**LOOK)
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS, help="file of the JSON rows")
    for name, value in defaults.items():
        one = value[0] if isinstance(value, list) else value
        kind: dict[str, Any] = {"type": int if one is None else type(one)}
        kind |= {"nargs": "+"} if isinstance(value, list) else {}
        kind = {"action": "store_true"} if value is False else kind
        text = "a flag" if value is False else f"default: {value}"
        made.add_argument(f"--{name.replace('_', '-')}", default=value, help=text, **kind)
    return made


def append(path: Path, bench: str, case: str, **fields: object) -> None:
    """Append one row, with date, machine, commit and PyTorch's version."""
    row = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "bench": bench,
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "case": case,
        **fields,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def append_each(
    path: Path,
    bench: str,
    case: str,
    seconds: Mapping[str, Sequence[float]],
    width: int,
    versions: Mapping[str, str],
) -> None:
    """Append and log a row for each implementation, with its ratio to "ours"."""
    cells = []
    for name, times in seconds.items():
        median, faster = statistics.median(times), ratio(seconds, name, "ours")
        fields = {"median_s": round(median, 4), "seconds": [round(each, 4) for each in times]}
        fields |= {"version": versions[name], "ours_is_faster_by": round(faster, 3)}
        append(path, bench, case, base_width=width, implementation=name, **fields)
        cells.append(f"{name} {median:.3f} s ({faster:.2f}x)")
    logging.info("%-40s %s", case, ", ".join(cells))


def best_device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_turn(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    look: Callable[[str, Any], None] | None = None,
) -> dict[str, list[float]]:
    """Time `runs` in turn; return seconds by name, of a first round and then of `rounds` others.

    `look` gets the name and the result of each run.
    """
    device = best_device()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            gc.collect()
            synchronize(device)
            start = clock()
            result = run()
            synchronize(device)
            seconds[name].append(clock() - start)
            if look is not None:
                look(name, result)
            del result
    return seconds


def after_first(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the seconds of all rounds but the first."""
    return {name: each[1:] for name, each in seconds.items()}


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Return the median ratio of `seconds[name]` to `seconds[base]`, paired by round."""
    pairs = zip(seconds[name], seconds[base], strict=False)
    return statistics.median(one / other for one, other in pairs)


def size_of(text: str) -> tuple[int, int, int]:
    """Return frames, height and width of a text such as 81x480x832."""
    frames, height, width = map(int, text.split("x"))
    return frames, height, width


def machine() -> str:
    """Return the GPU's name, or the processor, its threads and its widest vector unit."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name, flags = platform.processor(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
        fields = {key.strip(): value.strip() for key, value in lines}
        name, flags = fields.get("model name", name), fields.get("flags", "")
    units = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
    unit = next((unit for unit in units if unit in flags.split()), "no vector unit known")
    return f"{name}, {torch.get_num_threads()} threads, {unit}"


def process_mib(field: str, process: int | str = "self") -> float:
    """Return `field` of `/proc/*/status` in MiB: VmHWM is the peak, VmRSS the memory in use."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if files other than the results changed."""
    name = _git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    others = [":/", f":(exclude,top){RESULTS.relative_to(RESULTS.parents[2]).as_posix()}"]
    changed = _git("diff", "--quiet", "HEAD", "--", *others).returncode == 1
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["git", *arguments]
    try:
        return subprocess.run(
            command, cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git on this machine
        return subprocess.CompletedProcess(command, 127, "", "")
