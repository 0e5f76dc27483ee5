"""The GPU benchmark runs unattended: a failing row does not stop the others."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fast_video_vae.kernels import sample_inputs
from fast_video_vae.tests.benchmarks.gpu import flops, ops, rows, session, table, turns, vae

SCRIPT = Path(__file__).with_name("bench_gpu.py")
HERE = ["missing", "ok"]
MACHINE = {"commit", "cuda", "cudnn", "date", "device_name", "driver", "torch", "triton"}


def run(path, *arguments):
    """Run the script with tiny sizes; return its output and the rows."""
    command = [sys.executable, str(SCRIPT), "--small", "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, json.loads(path.read_text(encoding="utf-8"))


def statuses(content, *sections):
    return sorted({r["status"] for r in content["rows"] if r["section"] in sections})


def small_session(seconds):
    clock = rows.Clock(time.time() + seconds)
    return session.Session(torch.device("cpu"), small=True, clock=clock)


def test_only_named_sections_run_and_the_tables_are_printed_last(tmp_path):
    path = tmp_path / "rows.json"
    output, content = run(path, "--only", "copy", "attention")
    assert statuses(content, "copy") == ["ok"]
    assert statuses(content, "attention") == HERE
    assert {row["section"] for row in content["rows"]} == {"copy", "attention"}
    assert content["machine"].keys() >= MACHINE
    assert output.endswith(path.with_suffix(".txt").read_text(encoding="utf-8"))
    assert output.rstrip().splitlines()[-1].startswith("Rows: ")


@pytest.mark.slow
def test_rows_without_time_are_reported_and_measured_by_the_next_run(tmp_path):
    path = tmp_path / "rows.json"
    _, content = run(path, "--budget", "0")
    assert {row["section"] for row in content["rows"]} == set(table.TITLES)
    assert statuses(content, *table.TITLES) == ["not run"]
    names = [(row["section"], row["name"]) for row in content["rows"]]
    assert len(set(names)) == len(names)
    _, content = run(path, "--continue", "--only", "copy")
    assert statuses(content, "copy") == ["ok"]
    assert statuses(content, "vae") == ["not run"]
    assert sorted((row["section"], row["name"]) for row in content["rows"]) == sorted(names)


@pytest.mark.slow
def test_every_row_of_every_section_runs(tmp_path):
    path = tmp_path / "rows.json"
    output, content = run(path)
    failed = [row for row in content["rows"] if row["status"] not in HERE]
    assert not failed
    assert {row["section"] for row in content["rows"]} == set(table.TITLES)
    missing = {row["reason"] for row in content["rows"] if row["status"] == "missing"}
    known = "Triton is for GPUs|FAST_VIDEO_VAE_CUDA=1|no ComfyUI|not import|no VAE of this layout"
    assert all(re.search(known, reason) for reason in missing), missing
    assert all(row["device"] == content["device"] for row in content["rows"])
    keys = {key for row in content["rows"] for key in row["values"]}
    assert keys <= table.COLUMNS.keys()
    assert output.rstrip().splitlines()[-1].startswith("Rows: ")


def test_a_failing_case_is_reported_and_the_others_run(tmp_path):
    def half():
        yield "a", {"ms": 1.0}
        raise torch.OutOfMemoryError("no memory")

    def absent():
        raise rows.Missing("no such thing")

    cases = [
        rows.Case("x", ("a", "b"), half),
        rows.Case("x", ("c",), absent),
        rows.Case("y", ("a",), lambda: [("a", {"s": 2.0})]),
    ]
    file = rows.Rows(tmp_path / "rows.json", {"device": "cpu"})
    for _ in rows.run_section(file, rows.Clock(time.time() + 60), "copy", cases, "cpu"):
        pass
    kept = rows.Rows(file.path).rows
    assert [(row["name"], row["status"]) for row in kept] == [
        ("x: a", "ok"), ("x: b", "failed"), ("x: c", "missing"), ("y: a", "ok"),
    ]  # fmt: skip
    assert kept[1]["reason"] == "OutOfMemoryError: no memory"


def test_a_crash_is_reported_in_the_running_rows(tmp_path):
    file = rows.Rows(tmp_path / "rows.json", {"device": "cpu"})
    file.begin("ops", ["a", "b"])
    file.add("ops", "a", {"ms": 1.0}, "cpu")
    found = rows.Rows(file.path)  # the file was saved before the row was added
    found.end_running(RuntimeError("it died"))
    assert [(row["name"], row["status"]) for row in found.rows] == [
        ("a", "failed"), ("b", "failed"),
    ]  # fmt: skip
    assert rows.Rows(file.path).content["running"] is None


def test_every_op_is_called_at_the_widths_of_the_vaes():
    called = ops.calls()
    assert {call.op for call in called} == set(sample_inputs.OPS) - {"attention"}
    assert len({call.name for call in called}) == len(called)
    for op in ("rms_norm_silu", "bias_residual"):
        widths = {call.channels for call in called if call.op == op}
        assert widths == {96, 192, 384, 160, 256, 512, 640, 1024}


def test_flops_grow_by_the_same_amount_per_latent():
    small = small_session(0)
    config = small.ours("wan2.1").config
    one, five, nine = (flops.video_flops(config, "decode", n, 32, 32) for n in (1, 5, 9))
    assert nine - five == five - one > 2 * one  # three temporal taps instead of one, four frames


def test_a_clip_that_would_exceed_the_budget_is_not_started():
    late = small_session(5)
    clip = vae.Clip("wan2.1", "decode", 5, 32, 32)
    late.rates["wan2.1", "decode", "comfyui"] = 1.0
    with pytest.raises(rows.NotRun, match=r"two runs would take 20 s; [345] s were left"):
        vae._expected_s(late, clip, "comfyui", 10.0, 0.0)


def test_runs_alternate_and_a_failing_run_is_dropped():
    order = []

    def fails():
        order.append("b")
        if order.count("b") == 3:  # in the second round
            raise RuntimeError("no more")

    here = small_session(60)
    runs = {"a": lambda: order.append("a"), "b": fails}
    results = turns.in_turn(here, runs, shares_memory=True)
    assert order == ["a", "b", "a", "b", "a", "b", "a"]
    assert len(results["a"].seconds) == 3
    assert str(results["b"].error) == "no more"
