"""`fast-video-vae info`: tables of VAE, device and backends that fit a terminal."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae import kernels
from fast_video_vae.kernels import native_library
from fast_video_vae.kernels.backends import CONVOLUTIONS, ORDER
from fast_video_vae.tests.builders import decoder_of, random_state_dict
from fast_video_vae.vae.bench import device_report
from fast_video_vae.vae.streaming.prepared import device_check
from fast_video_vae.vae.streaming.prepared.cases import Case

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.vae.cli import info  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"


@pytest.fixture(scope="module")
def matrix():
    return kernels.backend_matrix()


@pytest.fixture
def lines_of(run):
    """Return a function that runs `info` and returns its output lines."""

    def call(*arguments):
        code, lines, _ = run("info", *arguments)
        assert code == 0
        return lines

    return call


def tables_of(lines):
    """Return the cells of the tables of backends."""
    ends = [n for n, line in enumerate(lines) if not line]
    found = "\n".join(lines[: ends[-1]]).split("\n\n")[:-1]
    return [[re.split(r"  +", line) for line in table.split("\n")] for table in found]


def test_the_tables_have_a_line_per_op_and_fit_a_terminal(lines_of, matrix, monkeypatch):
    devices = "cpu", "cuda"
    on_cpu = [each for each in matrix if each.device == "cpu"]
    rows = [each._replace(device=device) for each in on_cpu for device in devices]
    monkeypatch.setattr(kernels, "backend_matrix", lambda: rows)
    lines = lines_of("--backends", "--quiet")
    assert max(len(line) for line in lines if not line.startswith("library")) <= info.WIDTH
    tables = tables_of(lines)
    assert [table[0] for table in tables] == [
        ["op", *(f"{device} {name}" for name in names)]
        for device in devices
        for names in (ORDER, CONVOLUTIONS)
    ]
    ops = [row[0] for table in tables for row in table[1:]]
    assert ops == list(dict.fromkeys(each.op for each in matrix)) * len(devices)
    assert all(row[-1] == "exact" for table in tables for row in table[1:])  # the reference
    assert f"torch     {torch.__version__}" in lines
    assert any(re.match(r"CPU +\w+", line) for line in lines)


def test_the_documentation_has_the_tables_of_ops_and_backends(lines_of, matrix, monkeypatch):
    """Compare all cells where the native backend is available, otherwise headings and ops."""
    on_cpu = [each for each in matrix if each.device == "cpu"]
    monkeypatch.setattr(kernels, "backend_matrix", lambda: on_cpu)
    lines = lines_of("--backends")
    section = PAGE.read_text("utf-8").partition("\n## Ops\n")[2].partition("\n## torch.compile")[0]
    found = re.findall(r"^\| (.*) \|$", section, flags=re.MULTILINE)
    shown = [[cell.strip("`") for cell in line.split(" | ")] for line in found]
    rows = [row for table in tables_of(lines) for row in table]
    rows = [[cell.removeprefix("cpu ") for cell in row] for row in rows]
    assert [len(row) for row in shown] == [len(row) for row in rows]
    assert [row for row in shown if row[0] == "op"] == [row for row in rows if row[0] == "op"]
    assert [row[0] for row in shown] == [row[0] for row in rows]
    if native_library().missing is None:
        assert shown == rows
        reasons = dict.fromkeys(each.reason for each in on_cpu if each.reason)
        assert all(f"({n}) {reason}" in section for n, reason in enumerate(reasons, 1))


def test_a_vae_has_a_plan_per_size(lines_of, vae_path, tmp_path, monkeypatch):
    monkeypatch.setattr(info, "SIZES", info.SIZES[::4])
    names = [f"{width}x{height}" for width, height in info.SIZES]
    tables = []
    for options, where in (((), "free"), (("--limit", "0.2"), "within 0.2 GiB")):
        lines = lines_of(vae_path, *options)
        head = dict(line.split(maxsplit=1) for line in lines[:10])
        assert (head["file"], head["family"]) == (str(vae_path), "wan2.1")
        assert head["base"] == "width    encoder 8, decoder 8"
        count = sum(value.numel() for value in random_state_dict(8).values())
        assert head["parameters"] == f"{count:,}"
        assert re.fullmatch(rf"memory in addition .*{where}.*", lines[11])
        assert max(map(len, lines[11:])) <= info.WIDTH
        table = lines[13:]
        assert [line.split()[0] for line in table[::2]] == names
        assert [" encode " in line for line in table] == [True, False] * len(names)
        assert all(re.search(r"\d [MG]iB  \d latent", line) for line in table)
        tables.append(table)
    assert "whole frames" in tables[0][0]
    assert tables[1][-1].endswith("; more than the limit")
    save_file(decoder_of(random_state_dict(8)), tmp_path / "vae.safetensors")
    table = lines_of(tmp_path / "vae.safetensors")[-len(names) :]
    assert [line.split()[:2] for line in table] == [[name, "decode"] for name in names]


def test_the_check_shows_each_result_and_what_was_tried(lines_of, monkeypatch):
    """On a CPU where one case is wrong in bfloat16, and right where frames are convolved."""
    bounds = {torch.float32: 1e-4, torch.bfloat16: 0.08}
    cases = [Case(name, lambda *_: None, bounds) for name in ("attention", "a block")]

    def rows(device, dtype, fallback=None, wanted=None):
        for case in cases if wanted is None else wanted:
            right = dtype == torch.float32 or case is cases[0] or (fallback and fallback.sliced)
            yield device_check.Row(case, 1e-5 if right else 1.5, case.bounds[dtype])

    for module in (device_check, device_report):
        monkeypatch.setattr(module, "rows", rows)
    monkeypatch.setattr(device_report, "fastest_decode_dtype", lambda _: torch.bfloat16)
    lines = lines_of("--check", "--device", "cpu")
    assert ", compute capability " in lines[0]
    assert f"torch {torch.__version__}" in "".join(lines)
    end = lines.index("fp32: all right")
    assert "0.001 % (0.01 %)" in lines[end - 3]
    assert "WRONG: 1.5e+02 % (8 %)" in lines[end - 2]
    wrong, *tried = lines[end + 1 :]
    assert wrong.startswith("bf16: wrong results in bfloat16: a block; convolutions of single")
    assert tried[:2] == ["  with plain ops: a block", "  with convolutions of single frames: right"]
