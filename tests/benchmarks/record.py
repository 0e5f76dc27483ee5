"""JSON rows of results, with the machine, the commit and the versions."""

import argparse
import datetime
import json
import logging
import platform
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("results.jsonl")


def parser(doc: str) -> argparse.ArgumentParser:
    """Log to stdout, and return an argument parser with the description `doc` and `--out`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS, help="file of the JSON rows")
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
