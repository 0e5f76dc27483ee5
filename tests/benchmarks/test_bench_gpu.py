"""The GPU benchmark runs unattended: what decides first, a row at once on disk, and a budget."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fast_video_vae.kernels import sample_inputs
from fast_video_vae.tests.benchmarks.gpu import (
    card,
    conv,
    flops,
    kernel_profile,
    kernel_tests,
    ops,
    rows,
    schedule,
    sections,
    session,
    supervise,
    table,
    turns,
)
from fast_video_vae.tests.benchmarks.gpu.clock import Clock

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


class Time:
    """A clock that only moves when a case takes seconds."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


class Run:
    """A run of fake sections, with the cases that were started, and when."""

    def __init__(self, path, budget, seconds):
        self.time, self.started = Time(), []
        self.clock = Clock(self.time.seconds + budget, now=self.time)
        self.session = session.Session(torch.device("cpu"), small=True, clock=self.clock)
        self.rows = rows.Rows(path, {"device": "cpu"}, now=self.time)
        self.sections = [self.section(name, *given) for name, given in seconds.items()]

    def section(self, name, seconds, takes, expected_s=lambda: 0.0):
        """A section of `seconds` whose cases take the seconds of `takes`."""

        def measure(label, took):
            self.started.append((label, self.time.seconds - 1000))
            self.time.seconds += took
            return iter([("a", {"s": took})])

        def cases(_):
            return [
                rows.Case(
                    f"{name}{n}", ("a",), lambda n=n, s=s: measure(f"{name}{n}", s), expected_s
                )
                for n, s in enumerate(takes)
            ]

        return schedule.Section(name, cases, seconds)

    def all(self):
        list(schedule.run_sections(self.rows, self.clock, self.sections, self.session))
        return [label for label, _ in self.started]

    def not_run(self):
        return {row["name"]: row["reason"] for row in self.rows.rows if row["status"] == "not run"}


def small_session(seconds):
    clock = Clock(seconds, now=lambda: 0.0)
    return session.Session(torch.device("cpu"), small=True, clock=clock)


def test_what_decides_comes_first_and_each_block_fits_into_its_minutes():
    order = list(sections.SECTIONS)
    assert order[:5] == ["copy", "tests", "profile", "conv", "vae"]
    assert order[-2:] == ["lora", "streams"]
    assert order == list(table.TITLES)
    minutes = [sum(section.seconds for section in block) / 60 for block in sections.BLOCKS]
    assert [block <= most for block, most in zip(minutes, (8, 9, 8), strict=True)] == [True] * 3


def test_sections_run_in_order_and_what_one_leaves_goes_to_the_next(tmp_path):
    run = Run(
        tmp_path / "rows.json", 60, {"x": (20, [1, 1]), "y": (20, [15, 15, 15]), "z": (20, [9])}
    )
    # x takes 2 of its 20 s, so y may start until 40 s: all of its three cases.
    assert run.all() == ["x0", "x1", "y0", "y1", "y2", "z0"]
    assert run.not_run() == {}


def test_a_section_that_takes_too_long_does_not_take_the_seconds_of_the_next(tmp_path):
    run = Run(
        tmp_path / "rows.json", 60, {"x": (20, [35, 5]), "y": (20, [15, 5, 5]), "z": (20, [5])}
    )
    # x ends at 35 s instead of 20 s; y keeps 20 s and ends at 55 s.
    assert run.all() == ["x0", "y0", "y1", "z0"]
    assert run.not_run() == {
        "x1: a": "the budget of the section was used up",
        "y2: a": "the budget of the section was used up",
    }


def test_a_short_run_measures_the_first_sections_in_full(tmp_path):
    run = Run(tmp_path / "rows.json", 25, {"x": (20, [10, 9]), "y": (20, [10]), "z": (20, [10])})
    assert run.all() == ["x0", "x1", "y0"]
    assert run.not_run() == {"z0: a": "the budget of the run was used up"}


def test_a_long_run_gives_each_section_more(tmp_path):
    run = Run(tmp_path / "rows.json", 120, {"x": (20, [15] * 4), "y": (20, [15] * 4)})
    assert run.all() == [f"{name}{n}" for name in "xy" for n in range(4)]


def test_a_case_that_would_exceed_the_budget_is_not_started(tmp_path):
    run = Run(tmp_path / "rows.json", 60, {"x": (20, [5], lambda: 61.0), "y": (20, [5])})
    assert run.all() == ["y0"]
    assert run.not_run() == {"x0: a": "it would take 61 s; 30 s were left"}


def test_continuing_runs_what_was_not_run_with_the_whole_budget(tmp_path):
    path = tmp_path / "rows.json"
    seconds = {"x": (20, [10, 9]), "y": (20, [10, 15]), "z": (20, [15, 15])}
    first = Run(path, 25, seconds)
    assert first.all() == ["x0", "x1", "y0"]
    again = Run(tmp_path / "other.json", 50, seconds)
    again.rows = rows.Rows(path, now=again.time)
    again.rows.forget_not_run(seconds)
    assert again.all() == ["y1", "z0", "z1"]
    assert again.rows.content["done"] == ["x", "y", "z"]


def test_a_section_without_cases_is_reported_and_the_next_one_runs(tmp_path):
    run = Run(tmp_path / "rows.json", 60, {"y": (20, [5])})

    def none(_):
        raise ValueError("no VAE")

    run.sections.insert(0, schedule.Section("x", none, 20))
    assert run.all() == ["y0"]
    assert run.rows.rows[0]["reason"] == "ValueError: no VAE"


def test_a_row_is_on_disk_before_the_next_one_is_measured(tmp_path):
    file = rows.Rows(tmp_path / "rows.json", {"device": "cpu"}, now=Time())

    def measure():
        yield "a", {"ms": 1.0}
        kept = rows.Rows(file.path)
        assert [row["name"] for row in kept.rows] == ["x: a"]
        assert kept.content["running"]["names"] == ["x: a", "x: b"]
        yield "b", {"ms": 2.0}

    cases = [rows.Case("x", ("a", "b"), measure)]
    list(schedule.run_cases(file, Clock(10, now=lambda: 0.0), "copy", cases))
    assert [row["status"] for row in file.rows] == ["ok", "ok"]


def test_no_section_measures_zeros():
    folder = SCRIPT.parent / "gpu"
    found = {path.name for path in folder.glob("*.py") if "zeros" in path.read_text("utf-8")}
    assert not found
    calls = conv.shapes(small_session(0))
    assert min(shape.into for shape in calls) == 3
    for call in ops.calls():
        made = sample_inputs.call(call.op, (4, 8, 8), call.dtype, torch.device("cpu"), call.given)
        tensors = [value for value in made.values() if isinstance(value, torch.Tensor)]
        assert all(bool(value.any()) for value in tensors), call.name


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
    known = "(Triton|CUDA C..) is for GPUs|no ComfyUI|not import|no VAE of this layout"
    known += "|needs a CUDA device|comfy_kitchen|only .* kernels|PyAV is not|has no Background"
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
    list(schedule.run_cases(file, Clock(60, now=lambda: 0.0), "copy", cases))
    kept = rows.Rows(file.path).rows
    assert [(row["name"], row["status"]) for row in kept] == [
        ("x: a", "ok"), ("x: b", "failed"), ("x: c", "missing"), ("y: a", "ok"),
    ]  # fmt: skip
    assert kept[1]["reason"] == "OutOfMemoryError: no memory"


def test_a_crash_is_reported_in_the_running_rows(tmp_path):
    file = rows.Rows(tmp_path / "rows.json", {"device": "cpu"})
    file.begin("ops", ["a", "b"])
    file.add("ops", "a", {"ms": 1.0})
    found = rows.Rows(file.path)
    found.end_running(RuntimeError("it died"))
    assert [(row["name"], row["status"]) for row in found.rows] == [("a", "ok"), ("b", "failed")]
    assert rows.Rows(file.path).content["running"] is None


WORKER = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
if not json.loads(path.read_text())["rows"]:
    {ends}
path.with_suffix(".second").touch()
"""


def supervised(path, ends, until):
    """Supervise a process whose first row ends with `ends`; return the rows."""
    rows.Rows(path, {"device": "cpu"}).begin("ops", ["a"])
    command = [sys.executable, "-c", WORKER.replace("{ends}", ends), str(path)]
    supervise.supervise(command, path, ["ops", "lora"], until)
    return [(row["name"], row["status"]) for row in rows.Rows(path).rows]


def test_another_process_continues_after_a_crash(tmp_path):
    path = tmp_path / "rows.json"
    assert supervised(path, "os._exit(3)", float("inf")) == [("a", "failed")]
    assert path.with_suffix(".second").exists()


def test_a_process_is_stopped_after_the_budget(tmp_path):
    path = tmp_path / "rows.json"
    assert supervised(path, "time.sleep(60)", 0.0) == [("a", "not run"), ("all", "not run")]
    assert not path.with_suffix(".second").exists()


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


def test_seconds_are_predicted_from_a_smaller_clip():
    late = small_session(15)
    late.rates["wan2.1", "decode", "comfyui"] = 1.0
    expected = late.expected_s(("wan2.1", "decode", "comfyui"), 10.0)
    assert expected == 20.0  # a first run and one round
    assert late.expected_s(("wan2.1", "decode", "ours"), 10.0) == 0.0
    with pytest.raises(rows.NotRun, match="it would take 20 s; 15 s were left"):
        schedule.check_fits(expected, late.clock.left())


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


CUDNN = "cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float, true>(int)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"void {CUDNN}", "layout conversions"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_kernel", "convolutions"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_fprop_optimized>(x)", "convolutions"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "products and attention"),
        ("Memcpy DtoH (Device -> Pageable)", "copies between host and device"),
        ("Memcpy DtoD (Device -> Device)", "copies on the device"),
        (
            "void at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)",
            "copies on the device",
        ),
        ("_rms_norm_silu", "this pack's kernels"),
        ("norm_pixels", "this pack's kernels"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "others"),
        ("aten::narrow", "others"),
    ],
)
def test_a_kernel_is_in_its_group(name, kind):
    assert kernel_profile.group(name, kernel_profile.own_names()) == kind


def test_the_profile_sums_times_by_group_and_counts_overlap_once():
    spans = [
        kernel_profile.Span("_rms_norm_silu", 0, 10, 10),
        kernel_profile.Span("Memcpy DtoH (x)", 5, 25, 20),  # on another stream
        kernel_profile.Span("_rms_norm_silu", 40, 50, 10),
    ]
    assert kernel_profile.busy_us(spans) == 35
    groups = kernel_profile.by_group(spans, frozenset({"_rms_norm_silu"}))
    assert groups["this pack's kernels"] == {"ms": 0.02, "percent": 50.0, "calls": 2}
    assert groups["convolutions"] == {"ms": 0.0, "percent": 0.0, "calls": 0}
    assert [each["kernel"] for each in kernel_profile.longest(spans)] == [
        "_rms_norm_silu", "Memcpy DtoH (x)",
    ]  # fmt: skip


def test_results_of_pytest_are_counted_with_and_without_processes():
    lines = [
        "tests/kernels/test_a.py::test_x[a b] PASSED   [  5%]",
        "[gw1] [ 12%] FAILED tests/kernels/test_a.py::test_y[bf16-3 3]",
        "tests/kernels/test_a.py::test_z ",  # started, not ended
        "tests/kernels/test_b.py::test_x SKIPPED (needs a CUDA device) [ 50%]",
        "E   AssertionError: PASSED",
    ]
    found = kernel_tests.results(lines)
    assert kernel_tests.summary(found) == {
        "passed": 1, "failed": 1, "skipped": 1, "failing": "test_a.py::test_y[bf16-3 3]",
    }  # fmt: skip


def test_a_smaller_card_shows_what_it_has_left(monkeypatch):
    gib, shares, reserved = 1 << 30, [], [1 << 30]
    whole = type("Properties", (), {"total_memory": 80 * gib})
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    before = torch.cuda.mem_get_info
    with card.smaller_card(torch.device("cuda"), 7 * gib):
        assert torch.cuda.mem_get_info("cuda") == (7 * gib, 8 * gib)
        reserved[0] = 6 * gib  # a decode fills the cache
        assert torch.cuda.mem_get_info() == (2 * gib, 8 * gib)
    assert shares == [0.1, 1.0]
    assert torch.cuda.mem_get_info is before
