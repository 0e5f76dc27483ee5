"""Triton where there is no GPU: kernels compile for chips that are elsewhere, and what is missing.

That the ops are right is tested with all others of `cases.SERVED`, in Triton's interpreter.
"""

import importlib
import json
import logging
import os
import subprocess

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, dispatch, errors, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import runtime, tiles
from fast_video_vae.tests.builders import module_command
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import missing, place, random, video

ops = importlib.import_module("fast_video_vae.kernels.triton_ops.ops")

# Shared memory that a program may have, in KiB.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@pytest.fixture
def here():
    """Tensors where Triton works: on a GPU, or on the CPU in its interpreter."""
    reason = missing("triton")
    if reason:
        pytest.skip(reason)
    with place("triton"):
        yield


@pytest.fixture
def by_name(here):
    """Triton alone is asked."""
    with use_backend("triton"):
        yield


@pytest.fixture
def fresh(monkeypatch):
    """As if nothing had been asked of Triton or logged yet."""
    for name in ("_found", "_broken"):
        monkeypatch.setattr(runtime, name, {})
    monkeypatch.setattr(errors, "_logged", set())


class Broken:
    """A kernel that cannot be started, and how often that was tried."""

    __name__ = "_broken_kernel"

    def __init__(self):
        self.tries = 0

    def __getitem__(self, grid):
        self.tries += 1
        raise RuntimeError("no compiler\nand a long story")


def check_resources(chips, cases):
    """Compile in a process without the interpreter, and look at what every kernel uses."""
    pytest.importorskip("triton", reason="compiling needs triton")
    command = module_command(
        "fast_video_vae.tests.kernels.cross_compile", *map(str, chips), "--", *cases
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["chip"] for line in lines} == set(chips)
    assert {line["case"] for line in lines} == set(cases)
    for line in lines:
        assert line["stack"] == 0, line
        assert line["shared"] <= SHARED[line["chip"]] << 10, line
        # Wide stores: of 16 bytes where a tile has channels in a row.
        assert line["widest"] >= 4 or line["kernel"] not in ("_rms_norm_silu", "_write"), line


def test_the_kernels_of_96_channels_compile_without_spills():
    check_resources([90], ["bf16,96"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(set(SHARED) - {103}))
def test_all_kernels_compile_for_every_chip_without_spills(chip):
    counts = (96, 160, 192, 256, 384, 512, 640, 1024)
    check_resources([chip], [*(f"bf16,{count}" for count in counts), "fp16,96", "fp32,384"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED)
def test_every_head_of_attention_compiles_for_every_chip_that_takes_it(chip):
    """The widest of each tile, pixels that fill the last block of keys and such that do not."""
    pytest.importorskip("triton", reason="compiling needs triton")
    attention = importlib.import_module("fast_video_vae.kernels.triton_ops.attention")
    heads = attention._TILES.get(divmod(chip, 10), attention._TILES_OF_OTHERS)
    cases = [f"bf16,{head},{length}" for head in heads for length in (3584, 3601)]
    check_resources([chip], [*cases, "fp16,384,3584"])


def test_the_interpreter_serves_nobody_who_did_not_ask_for_it(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.ones(2, 8)
    with pytest.raises(Refusal, match="the tensors are on cpu; triton is for GPUs"):
        dispatch.ask("triton", "silu_mul", x, x)
    with pytest.raises(Refusal, match="TRITON_INTERPRET=1"):
        runtime.refuse_device(torch.device("cuda", 0), torch.float32)


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda", 0)
    runtime.refuse_device(device, torch.float32)
    monkeypatch.setenv("FAST_VIDEO_VAE_TRITON", "0")
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_TRITON=0 switches it off"):
        runtime.refuse_device(device, torch.float32)
    with use_backend("triton"):
        runtime.refuse_device(device, torch.float32)


def test_bfloat16_is_refused_where_the_chip_has_none(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    for dtype in (torch.float32, torch.float16):
        runtime.refuse_device(device, dtype)
    with pytest.raises(Refusal, match=r"needs compute capability 8\.0; this GPU has 7\.5"):
        runtime.refuse_device(device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    runtime.refuse_device(device, torch.bfloat16)


def test_a_triton_that_is_not_there_is_told_once(monkeypatch, caplog, fresh):
    real = importlib.import_module

    def lacking(name, package=None):
        if name == "triton":
            raise ModuleNotFoundError("No module named 'triton'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", lacking)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.ones(2, 8)
    with caplog.at_level(logging.WARNING), use_backend("triton"):
        for _ in range(2):
            with pytest.raises(BackendError, match=r"\(triton: triton is not installed\)"):
                kernels.silu_mul(x, x)
    (line,) = caplog.messages
    assert "pip install triton" in line


def test_a_triton_that_compiles_nothing_is_told_once(monkeypatch, caplog, fresh):
    pytest.importorskip("triton")
    broken = Broken()
    probe = importlib.import_module("fast_video_vae.kernels.triton_ops.probe")
    monkeypatch.setattr(probe, "probe", broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(
                Refusal, match=r"cannot run a kernel on cpu \(RuntimeError: no compiler\)$"
            ):
                runtime.require(torch.device("cpu"))
    assert broken.tries == 1
    (line,) = caplog.messages
    assert "C compiler" in line


def test_a_kernel_that_does_not_start_leaves_the_call_to_the_next(here, monkeypatch, caplog, fresh):
    """The tail is what it was; the kernel is not tried again, and others go on."""
    rows, broken = (importlib.import_module(f"{ops.__package__}.rows"), Broken())
    monkeypatch.setattr(rows, "_rms_norm_silu", broken)
    monkeypatch.setattr(ops, "refuse_device", lambda *_: None)
    x, gamma = video(1, 16, 2, 3, 5), random(16, seed=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tail = video(1, 16, 2, 3, 5, seed=2)
            before = tail.clone()
            y = kernels.rms_norm_silu(x, gamma, tail=tail)
            assert torch.equal(y[:, :, :2], before)
            assert torch.equal(tail, y[:, :, 2:])
            formulas.check(tail, *formulas.rms_norm_silu(x, gamma))
    assert broken.tries == 1
    (line,) = caplog.messages
    assert "broken_kernel" in line
    with use_backend("triton"):
        formulas.holds("silu_mul", x.movedim(1, -1), x.movedim(1, -1))


def test_given_statistics_take_one_kernel_instead_of_three(by_name, monkeypatch):
    group_norm = importlib.import_module(f"{ops.__package__}.group_norm")
    started, launch = [], group_norm.launch

    def recorded(kernel, *args, **options):
        started.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(group_norm, "launch", recorded)
    x, ones = video(1, 16, 2, 3, 5), torch.ones(16)
    statistics = kernels.group_norm_statistics(x, 4)
    assert started == ["_sum", "_combine"]
    kernels.group_norm_silu(x, ones, ones, 4, statistics=statistics)
    assert started[2:] == ["_write"]
    kernels.group_norm_silu(x, ones, ones, 4)
    assert started[3:] == ["_sum", "_combine", "_write"]


def test_a_lone_frame_says_nothing_of_its_stride():
    """A stride of 1 there would make every load of the kernel a narrow one."""
    x = torch.empty_strided((1, 8, 1, 2, 3), (1, 1, 1, 24, 8))
    assert tiles.strides(x) == (0, 0)
    assert tiles.strides(video(2, 8, 3, 2, 3)) == (3 * 48, 48)


@pytest.mark.parametrize(
    ("channels", "rows", "expected"),
    [
        (1, None, (4096, 1, 4)),
        (96, None, (32, 128, 4)),
        (96, 5, (8, 128, 4)),
        (384, None, (8, 512, 4)),
        (1024, None, (4, 1024, 4)),
        (8192, None, (1, 8192, 8)),
    ],
)
def test_a_tile_holds_a_power_of_two_of_rows_and_channels(channels, rows, expected):
    assert tiles.tile(channels, rows=rows) == expected


def test_rows_that_are_too_long_are_refused(by_name):
    x = video(1, 8193, 1, 1, 1)
    with pytest.raises(BackendError, match="more than 8192 channels"):
        kernels.bias_residual(x)
