"""The check of a device as people see it: `info --check`, and the lines of the benchmark."""

import pytest
import torch

from fast_video_vae.kernels import Fallback
from fast_video_vae.vae import bench
from fast_video_vae.vae.bench import device_report
from fast_video_vae.vae.streaming.prepared import device_check
from fast_video_vae.vae.streaming.prepared.cases import Case
from fast_video_vae.vae.streaming.prepared.device_check import Row, Verdict

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.vae.cli import parser  # noqa: E402
from fast_video_vae.vae.cli.info import info  # noqa: E402

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
BOUNDS = {FP32: 1e-4, BF16: 0.08}


@pytest.fixture
def faulty(monkeypatch):
    """Play a CPU on which one case is wrong in bfloat16, and right where frames are convolved."""
    cases = [Case("attention", lambda *_: None, BOUNDS), Case("a block", lambda *_: None, BOUNDS)]

    def rows(device, dtype, fallback=Fallback(), wanted=None):  # noqa: B008, it is frozen
        for case in cases if wanted is None else wanted:
            is_wrong = dtype == BF16 and case is cases[1] and not fallback.sliced
            yield Row(case, 1.5 if is_wrong else 1e-5, case.bounds[dtype])

    for module in (device_check, device_report):
        monkeypatch.setattr(module, "rows", rows)
    monkeypatch.setattr(device_report, "fastest_decode_dtype", lambda _: BF16)


def test_info_shows_each_result_and_what_was_tried(faulty):
    args = parser.parse(["info", "--check", "--device", "cpu"], "")
    device, versions, table, end = info(args, lambda _: None).split("\n\n")
    assert device.startswith("cpu")
    assert f"torch {torch.__version__}" in versions
    _, attention, block = table.split("\n")
    assert "0.001 % (0.01 %)" in attention
    assert "WRONG: 1.5e+02 % (8 %)" in block
    right, wrong, *tried = end.split("\n")
    assert right == "fp32: all right"
    assert wrong.startswith("bf16: wrong results in bfloat16: a block; convolutions of single")
    assert tried[:2] == ["  with plain ops: a block", "  with convolutions of single frames: right"]


def test_the_benchmark_has_a_line_for_each_dtype(monkeypatch):
    text = "wrong results in bfloat16: attention; plain ops instead"
    known = {(CPU, FP32): Verdict(Fallback(), ""), (CPU, BF16): Verdict(Fallback(True), text)}
    monkeypatch.setattr(device_check, "_verdicts", known)
    assert bench.device_notes(CPU) == [
        "checked: cpu computes stored examples rightly in fp32",
        text,
    ]
