"""The device script runs unattended: every part runs, what fails is a row, and rows are kept."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from fast_video_vae.tests.benchmarks import bench_gpu
from fast_video_vae.tests.benchmarks.gpu_parts import PARTS
from fast_video_vae.tests.nodes.checkout import find_comfyui, why_unavailable

HERE = Path(__file__).parent

FAULTS = """
import ctypes, time, torch

def faults(bench):
    bench.case_s = 4
    yield "good", lambda: {"ms": 1.23456, "size": (1, 2)}
    yield "memory", lambda: torch.empty(1 << 60)
    yield "crash", lambda: ctypes.string_at(0)
    yield "lost", lambda: setattr(bench, "works", bool) or {"ms": 1.0}
    yield "again", lambda: {"ms": 2 * bench.found("faults")[0]["ms"]}
    yield "hang", lambda: time.sleep(3600)
    yield "next", dict

def broken(bench):
    yield "late", dict
    import no_such_module

PARTS = {"faults": (200, faults, ""), "broken": (0, broken, "")}
"""

# In place of the kernel for Hopper the library, whose way 1 is a column off.
PLAYED = """
from types import SimpleNamespace
from fast_video_vae.kernels import modules
from fast_video_vae.kernels.convolution import aten
from fast_video_vae.tests.benchmarks import gpu_parts, routed

def convolve(x, weight, bias, *more, tile):
    y = aten.conv3d(x, weight, bias, *more, 0)
    return y.roll(tile, -1)

launches = {"conv3d": lambda *args: convolve(*args[:-1], tile=args[-1])}
fields = {"refuse": lambda x: None, "launches": lambda: launches}
modules._loaded["hopper"] = SimpleNamespace(**fields)
routed.of_ours = lambda outputs: aten.Fused()
PARTS = {"hopper": gpu_parts.PARTS["hopper"]}
"""


def run(path, *arguments, parts=None, **environment):
    """Run the script without a ComfyUI, unless the environment has one; return its rows."""
    command = [sys.executable, HERE / "bench_gpu.py", "--out", path, *arguments]
    if parts is not None:
        path.with_suffix(".py").write_text(parts, encoding="utf-8")
        command += ["--parts", path.with_suffix(".py")]
    environment = os.environ | {"COMFYUI_PATH": str(path.parent)} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [*map(json.loads, path.read_text(encoding="utf-8").splitlines())]
    assert all(row["case"] in done.stdout for row in rows)
    return rows


@pytest.mark.slow
def test_every_part_runs_without_a_gpu_and_without_a_peer(tmp_path):
    rows = run(tmp_path / "rows.jsonl", "--patience", "999")
    whys = {row["case"]: row["why"] for row in rows if "why" in row}
    assert {row["part"] for row in rows} == PARTS.keys() - {"peers"}
    refused = ("Refusal: the tensors", "PeerUnavailableError: no ComfyUI")
    refused += ("Refusal: it needs an NVIDIA GPU of compute capability 9.0",)
    assert all(why.startswith(refused) for why in whys.values()), whys
    best = next(row for row in rows if row.get("implementation") == "best per layer")
    parts = (best[f"{name}_s"] for name in ("busy", "preparation", "idle"))
    assert sum(parts) == pytest.approx(best["s"], rel=0.01)
    assert not any(row.get("error", 0) > 0.01 or row.get("bad") for row in rows)
    assert sum(seconds for seconds, *_ in PARTS.values()) - PARTS["peers"][0] <= 450


@pytest.mark.slow
def test_a_fault_costs_one_case(tmp_path):
    rows = run(tmp_path / "rows.jsonl", "--patience", "0.1", parts=FAULTS)
    found = [(row["part"], row["case"], row.get("why", row.get("ms"))) for row in rows]
    module = "ModuleNotFoundError: No module named 'no_such_module'"
    assert found[1][2].startswith("out of memory: ")
    assert [found[0], *found[2:]] == [
        ("faults", "good", 1.235), ("faults", "crash", "crashed (status -11)"),
        ("faults", "lost", 1.0), ("faults", "again", 2.47), ("faults", "hang", "hung"),
        ("faults", "next", None), ("broken", "all", module),
        ("broken", "1 cases", "no time left for late"),
    ]  # fmt: skip


def test_parts_are_chosen_by_the_beginnings_of_their_names():
    names = "hopper", "conv", "convolutions", "comfyui"
    assert bench_gpu.chosen(names, ["comf, hop", "conv,hopper"]) == ["comfyui", "hopper", "conv"]
    with pytest.raises(SystemExit, match=f"^part is co, peer; expected {', '.join(names)}$"):
        bench_gpu.chosen(names, ["hop,co,peer"])


@pytest.mark.slow
def test_a_way_of_the_hopper_kernel_that_is_wrong_is_not_timed(tmp_path):
    rows = run(tmp_path / "rows.jsonl", "--patience", "99", parts=PLAYED)
    wrong = [row for row in rows if "hopper 1" in row["case"]]
    assert all(row[f"kw {column}"] > 0.1 for row in wrong[:-1] for column in range(3))
    assert wrong[-1]["why"].startswith("not run: hopper 1, 1x3x3 64 to 96")
    assert [row for row in rows if "why" in row] == wrong[-1:]
    timed = [(row["taps"][0], row["terms"]) for row in rows if row.get("by") == "hopper 0"]
    terms = ["bare", "bias + residual", "bias + norm"]
    assert timed == [*product((96, 192), terms), *product((384,), terms[:2])]
    right = [row for row in rows if row not in wrong]
    assert all(row.get("error", row.get("kw 1")) < 0.005 for row in right)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.comfyui
def test_the_peers_are_measured_from_the_folder_for_a_bare_machine(tmp_path):
    if reason := why_unavailable():
        pytest.skip(reason)
    made = [sys.executable, HERE / "prepare_gpu.py", "--comfyui", find_comfyui()]
    subprocess.run(made, check=True)
    rows = run(tmp_path / "rows.jsonl", "--only", "comfyui", "peers", COMFYUI_PATH="")
    assert {row.get("implementation") for row in rows} == {"comfyui", "diffusers"}
