"""Facts about the machine of a run: the device and the versions of the software."""

import contextlib
import datetime
import importlib
import platform
import subprocess
from typing import Any

import torch

from fast_video_vae.tests.benchmarks import record


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return the names and versions of `device` and software, and `commit`; None: not installed."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or record.commit(),
        "device_name": record.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "triton": _version("triton"),
        "driver": None,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "cudnn": torch.backends.cudnn.version(),
            "driver": asked("driver_version"),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "clocks_and_power": asked("clocks.max.sm,clocks.max.mem,power.limit"),
        }
    return facts


def _version(package: str) -> str | None:
    with contextlib.suppress(Exception):  # a broken installation raises anything
        return importlib.import_module(package).__version__
    return None


def asked(fields: str) -> str | None:
    """Return `fields` of the first GPU from nvidia-smi, or None."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    return None
