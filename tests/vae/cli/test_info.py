"""`fast-video-vae info`: tables of VAE, device and backends that fit a terminal."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import backend_matrix, native_library, support
from fast_video_vae.kernels.backends import CONVOLUTIONS, ORDER
from fast_video_vae.tests.builders import decoder_of, module_command, random_state_dict, succeeded

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.vae.cli import info  # noqa: E402
from fast_video_vae.vae.cli.info import (  # noqa: E402
    SIZES,
    WIDTH,
    reasons_of,
    support_table,
    tables_of,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def matrix():
    return backend_matrix()


@pytest.fixture
def lines_of(run):
    """Return a function that runs `info` and returns its output lines."""

    def call(*arguments):
        code, lines, _ = run("info", *arguments)
        assert code == 0
        return lines

    return call


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cuda")])
def test_the_tables_have_a_line_per_op_and_fit_a_terminal(lines_of, matrix, monkeypatch, devices):
    on_cpu = [each for each in matrix if each.device == "cpu"]
    rows = [replace(each, device=device) for device in devices for each in on_cpu]
    monkeypatch.setattr(info, "backend_matrix", lambda: rows)
    lines = lines_of("--backends", "--quiet")
    assert max(len(line) for line in lines if not line.startswith("library")) <= WIDTH
    heads = [re.split(r"  +", line) for line in lines if line.startswith("op ")]
    assert heads == [
        ["op", *(f"{device} {name}" for name in names)]
        for device in devices
        for names in (ORDER, CONVOLUTIONS)
    ]
    first, second = [n for n, line in enumerate(lines) if not line][:2]
    tables = lines[1:first], lines[first + 2 : second]
    ops = [line.split()[0] for table in tables for line in table]
    assert ops == list(dict.fromkeys(each.op for each in matrix))
    assert all(line.split()[-1] == "exact" for table in tables for line in table)  # the reference
    text = "\n".join(lines)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}", text, flags=re.MULTILINE)
    assert re.search(r"^CPU +\w+", text, flags=re.MULTILINE)


def test_a_vae_is_printed_before_the_table(lines_of, vae_path):
    lines = lines_of(vae_path, "--backends", "-q")
    table = lines_of("--backends", "-q")
    head = dict(line.split(maxsplit=1) for line in lines[:11] if line)
    assert (head["file"], head["family"]) == (str(vae_path), "wan2.1")
    assert head["base"] == "width    encoder 8, decoder 8"
    count = sum(value.numel() for value in random_state_dict(8).values())
    assert head["parameters"] == f"{count:,}"
    assert lines[-len(table) :] == table


def test_a_vae_has_a_plan_per_size(lines_of, vae_path):
    names = [f"{width}x{height}" for width, height in SIZES]
    tables = []
    for options, where in (((), "free"), (("--limit", "0.2"), "within 0.2 GiB")):
        lines = lines_of(vae_path, *options)
        (head,) = [n for n, line in enumerate(lines) if line.startswith("memory in addition")]
        assert where in lines[head]
        assert max(map(len, lines[head:])) <= WIDTH
        table = lines[head + 2 :]
        assert [line.split()[0] for line in table[::2]] == names
        assert [" encode " in line for line in table] == [True, False] * len(names)
        assert all(re.search(r"\d [MG]iB  \d latent", line) for line in table)
        tables.append(table)
    free, tight = tables
    assert "whole frames" in free[0]
    assert tight[-1].endswith("; more than the limit")


def test_a_decoder_only_vae_has_plans_for_decoding(lines_of, tmp_path):
    save_file(decoder_of(random_state_dict(8)), tmp_path / "vae.safetensors")
    table = lines_of(tmp_path / "vae.safetensors")[-len(SIZES) :]
    assert [line.split()[1] for line in table] == ["decode"] * len(SIZES)


@pytest.mark.parametrize("arguments", [("--device",), ("--device", "cpu")])
def test_a_device_is_named(lines_of, arguments):
    (line,) = lines_of("--quiet", *arguments)
    assert ", compute capability " in line


SWITCHED_OFF = (
    {"FAST_VIDEO_VAE_NATIVE": "0"},
    "FAST_VIDEO_VAE_NATIVE=0 disables the native kernels",
)
NO_COMPILER = {"CXX": "no-such-compiler"}, "the C++ compiler no-such-compiler is not installed"
NO_BUILD = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


def test_the_compiler_of_the_gpu_kernels_is_named(lines_of, matrix, monkeypatch):
    """On Windows without Triton it is what compiles the kernels."""
    monkeypatch.setattr(info, "backend_matrix", lambda: matrix)
    if torch.version.cuda is None:
        line = "compiler  none for GPUs (this PyTorch is built without CUDA)"
        assert line in lines_of("--backends", "--quiet")
    found = SimpleNamespace(version="nvrtc 12.8")
    monkeypatch.setattr(support, "compiler", lambda: found)
    (line,) = (each for each in lines_of("--backends", "--quiet") if each.startswith("compiler"))
    assert line.startswith("compiler  nvrtc 12.8; cuda needs no Triton and no toolkit")


@pytest.mark.parametrize(
    ("setting", "reason", "quiet"),
    [
        (*SWITCHED_OFF, False),
        pytest.param(*NO_COMPILER, True, marks=NO_BUILD),
        pytest.param(*SWITCHED_OFF, True, marks=pytest.mark.slow),
        pytest.param(*NO_COMPILER, False, marks=[NO_BUILD, pytest.mark.slow]),
    ],
)
def test_missing_tools_are_named_and_the_reference_is_used(tmp_path, setting, reason, quiet):
    command = module_command("fast_video_vae.vae.cli", "info", "--backends", *["--quiet"] * quiet)
    environment = {**os.environ, "FAST_VIDEO_VAE_CACHE": str(tmp_path)} | setting
    done = succeeded(command, env=environment)
    lines = done.stdout.splitlines()
    assert f"(3) {reason}" in lines  # (1) and (2): triton and cuda need a GPU
    assert f"missing   {reason}" in lines
    assert "library   none" in lines
    assert re.search(
        r"^silu_mul +no \(1\) +no \(2\) +no \(3\) +exact", done.stdout, flags=re.MULTILINE
    )
    if quiet:
        assert done.stderr == ""
    else:
        (note,) = done.stderr.splitlines()
        assert note.startswith("note: ")
        assert reason in note


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_the_library_is_built_with_a_note_and_reused(tmp_path):
    command = module_command("fast_video_vae.vae.cli", "info", "--backends")
    environment = {**os.environ, "FAST_VIDEO_VAE_CACHE": str(tmp_path)}
    first, second = (succeeded(command, env=environment) for _ in range(2))
    assert re.fullmatch(r"note: building the CPU kernels once, .*\n", first.stderr)
    assert second.stderr == ""
    assert first.stdout == second.stdout
    (library,) = tmp_path.rglob("*.so")
    assert f"library   {library}" in first.stdout.splitlines()


def test_the_documentation_has_the_tables_of_ops_and_backends(matrix):
    """Compare all cells where the native backend is available, otherwise headings and ops."""
    section = PAGE.read_text("utf-8").partition("\n## Ops\n")[2].partition("\n## torch.compile")[0]
    lines = re.findall(r"^\| (.*) \|$", section, flags=re.MULTILINE)
    shown = [[cell.strip("`") for cell in line.split(" | ")] for line in lines]
    on_cpu = [each for each in matrix if each.device == "cpu"]
    reasons = reasons_of(on_cpu)
    rows = [
        [cell.removeprefix("cpu ") for cell in row]
        for table in tables_of(on_cpu)
        for row in support_table(table, reasons)
    ]
    if native_library().missing is None:
        assert shown == rows
        assert all(f"({number}) {reason}" in section for number, reason in enumerate(reasons, 1))
    else:
        assert [len(row) for row in shown] == [len(row) for row in rows]
        assert [row for row in shown if row[0] == "op"] == [row for row in rows if row[0] == "op"]
        assert [row[0] for row in shown] == [row[0] for row in rows]
