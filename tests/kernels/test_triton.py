"""The Triton backend without a GPU: cross-compilation for other chips, refusals and failures.

`test_ops.py` compares its results with the formulas, in Triton's interpreter.
"""

import importlib
import json
import logging
import os
import subprocess
from importlib import metadata
from itertools import product

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

# Limit of the shared memory of a program, in KiB, by compute capability.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}

# AMD GPUs with their own tiles, and the local memory of a program in KiB.
AMD = {"gfx942": 64, "gfx1100": 64, "gfx1201": 64}

# Convolutions that are compiled: one for every chip, other widths for those with descriptors, and
# inputs that no block divides.
CONVOLUTIONS = [
    *((chip, "fp16,96,96") for chip in (*sorted(set(SHARED) - {103}), *AMD)),
    *product((90, 100, 120), ("bf16,192,192", "fp16,384,384")),
    (80, "fp16,3,96"),
]


def by_night(cases):
    """Leave the cases `(chip, ...)` of all chips but sm_90 to the nightly run."""
    marks = {90: ()}
    return [pytest.param(*case, marks=marks.get(case[0], pytest.mark.nightly)) for case in cases]


# Channels of the int8 convolution; what AMD GPUs and sm_103 lack is the caller's next candidate.
CODES = (96, 192, 384)


@pytest.fixture
def here():
    """Create tensors on a GPU, or on the CPU for Triton's interpreter."""
    reason = missing("triton")
    if reason:
        pytest.skip(reason)
    with place("triton"):
        yield


@pytest.fixture
def by_name(here):
    """Force the Triton backend."""
    with use_backend("triton"):
        yield


@pytest.fixture
def fresh(monkeypatch):
    """Reset the state of a process: Triton was not tried, and no warning is logged."""
    for name in ("_found", "_broken"):
        monkeypatch.setattr(runtime, name, {})
    monkeypatch.setattr(errors, "_logged", set())


class Broken:
    """A kernel whose launches fail with `error`, if `fails` of their constants; `tries` counts.

    Other launches are those of the kernel `otherwise`.
    """

    __name__ = "_broken_kernel"

    def __init__(
        self, error="no compiler\nand a long story", fails=lambda **_: True, otherwise=None
    ):
        self.tries = 0
        self._error, self._fails, self._otherwise = error, fails, otherwise

    def __getitem__(self, grid):
        def start(*args, **constants):
            self.tries += 1
            if self._fails(**constants):
                raise RuntimeError(self._error)
            if self._otherwise is not None:
                self._otherwise[grid](*args, **constants)

        return start


def compiled_lines(script, chips, cases):
    """Run a script that compiles, in a process without the interpreter; return its lines."""
    pytest.importorskip("triton", reason="compiling needs triton")
    command = module_command(
        f"fast_video_vae.tests.kernels.{script}", *map(str, chips), "--", *cases
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_resources(chips, cases, spilling=tuple(AMD)):
    """Compile for `chips`, and check the resources of every kernel; `spilling` may spill."""
    lines = compiled_lines("cross_compile", chips, cases)
    assert {line["chip"] for line in lines} == set(chips)
    assert {line["case"] for line in lines} == set(cases)
    for line in lines:
        assert line["stack"] == 0 or line["chip"] in spilling, line
        assert line["shared"] <= (SHARED | AMD)[line["chip"]] << 10, line
        # Stores are 16 bytes wide where a tile has consecutive channels.
        wide = line["kernel"] in ("_rms_norm_silu", "_write") and line["chip"] not in AMD
        assert not wide or line["widest"] >= 4, line
        # The hardware loads the patches of a frame.
        assert line["kernel"] != "convolve_patches" or line["tma"], line


def test_the_kernels_of_96_channels_compile_without_spills():
    check_resources([90], ["bf16,96"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", by_night(zip((*sorted(set(SHARED) - {103}), *AMD))))
def test_all_kernels_compile_for_every_chip_without_spills(chip):
    counts = (96, 160, 192, 256, 384, 512, 640, 1024)
    check_resources([chip], [*(f"bf16,{count}" for count in counts), "fp16,96", "fp32,384"])


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "case"), by_night(CONVOLUTIONS))
def test_tiles_of_the_convolution_compile_for_every_chip_without_spills(chip, case):
    check_resources([chip], [f"conv-{case}"])


def test_the_int8_convolution_of_96_channels_compiles_without_spills():
    check_resources([89], ["int8-bf16,96,96"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", by_night(zip(sorted(set(SHARED) - {103}))))
def test_the_int8_convolution_compiles_for_every_chip_without_spills(chip):
    """Widths of the networks, those of other tiles, and inputs that no block divides.

    On sm_90, tiles of 128 and 160 channels spill after their loop, and are the fastest ones.
    """
    sizes = [*((count, count) for count in CODES), (32, 64), (3, 96)]
    sizes += [(256, 256), (320, 160)] if chip != 90 else []
    cases = [f"int8-bf16,{inputs},{outputs}" for inputs, outputs in sizes]
    check_resources([chip], [*cases, "int8-fp32,192,192"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 86, 89, 120])
def test_tensor_cores_limit_the_int8_convolution(chip):
    """The margin is that of the rate of A100; a GeForce has half of it, and twice the margin."""
    cases = [f"int8-bf16,{channels},{channels}" for channels in CODES]
    lines = compiled_lines("count_sass", [chip], cases)
    first = [next(line for line in lines if line["case"] == case) for case in cases]
    assert all(line["products"] and not line["stack"] for line in first)
    assert min(line["margin"] for line in first) >= 1.9, first


@pytest.mark.slow
def test_tensor_cores_limit_the_convolutions_with_float16_sums():
    """On Ada, the first tile of each width issues fewer instructions than cycles of products."""
    cases = [f"fp16,{channels},{channels}" for channels in (96, 192, 384)]
    lines = compiled_lines("count_sass", [89], cases)
    # Triton 3.2 spills two registers in a tile that is not the first.
    spilled = 8 if metadata.version("triton").startswith("3.2.") else 0
    for case in cases:
        first, *others = (line for line in lines if line["case"] == case)
        assert first["HALF"]
        assert not first["stack"]
        assert all(line["stack"] <= spilled for line in others)
        # With a norm and without.
        for line in (first, *others):
            if line["M"] == first["M"] and line["HALF"]:
                assert line["margin"] >= 1.3, line


@pytest.mark.slow
@pytest.mark.parametrize("chip", by_night(zip((*SHARED, *AMD))))
def test_attention_compiles_for_every_head_and_chip(chip):
    """Each tile runs with its widest head, and with a full and a partial last block of keys."""
    pytest.importorskip("triton", reason="compiling needs triton")
    attention = importlib.import_module("fast_video_vae.kernels.triton_ops.attention")
    heads = attention.tiles_of(chip if chip in AMD else divmod(chip, 10))
    cases = [f"bf16,{head},{length}" for head in heads for length in (3584, 3601)]
    check_resources([chip], [*cases, "fp16,384,3584"], spilling=("gfx1100",))


def test_the_interpreter_is_used_only_if_forced(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.ones(2, 8)
    with pytest.raises(Refusal, match="the tensors are on cpu; triton needs an NVIDIA"):
        dispatch.ask("triton", "silu_mul", x, x)
    with pytest.raises(Refusal, match="TRITON_INTERPRET=1"):
        runtime.refuse_device(torch.device("cuda", 0), torch.float32)


def test_triton_can_be_disabled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda", 0)
    runtime.refuse_device(device, torch.float32)
    monkeypatch.setenv("FAST_VIDEO_VAE_TRITON", "0")
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_TRITON=0 disables it"):
        runtime.refuse_device(device, torch.float32)
    with use_backend("triton"):
        runtime.refuse_device(device, torch.float32)


def test_bfloat16_is_refused_on_gpus_without_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    for dtype in (torch.float32, torch.float16):
        runtime.refuse_device(device, dtype)
    with pytest.raises(Refusal, match=r"needs compute capability 8\.0; this GPU has 7\.5"):
        runtime.refuse_device(device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    runtime.refuse_device(device, torch.bfloat16)


def test_a_missing_triton_is_logged_once(monkeypatch, caplog, fresh):
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
    assert "so other kernels are used" in line
    assert "pip install triton" in line


def test_a_broken_triton_is_logged_once(monkeypatch, caplog, fresh):
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


def test_another_backend_runs_after_a_failed_launch(here, monkeypatch, caplog, fresh):
    """The tail is unchanged, the kernel is not launched again, and other kernels run."""
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


def test_only_the_variant_that_fails_is_broken(caplog, fresh):
    """Other widths and dtypes of the kernel run, and the kernel is logged once."""
    broken = Broken(fails=lambda **constants: constants["CHANNELS"] > 128)
    x = torch.ones(4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for channels in (192, 256):
                with pytest.raises(Refusal, match=r"broken_kernel failed \(RuntimeError: no comp"):
                    runtime.launch(broken, (1,), x, None, CHANNELS=channels)
            runtime.launch(broken, (1,), x, None, CHANNELS=96)
    assert broken.tries == 2 + 2
    for args in ((x.half(), None), (x, x)):
        with pytest.raises(Refusal):
            runtime.launch(broken, (1,), *args, CHANNELS=192)
    with pytest.raises(Refusal):
        runtime.launch(broken, (1,), x, None, CHANNELS=192, warps=8)
    assert broken.tries == 4 + 3
    (line,) = caplog.messages
    assert "broken_kernel" in line


def test_a_launch_without_memory_is_tried_again(fresh, caplog):
    broken = Broken("Triton Error [CUDA]: out of memory")
    for tries in (1, 2):
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="out of memory"):
            runtime.launch(broken, (1,), torch.ones(4))
        assert broken.tries == tries
    assert not caplog.messages


def test_a_check_of_triton_without_memory_is_repeated(fresh, monkeypatch):
    pytest.importorskip("triton")
    probe = importlib.import_module("fast_video_vae.kernels.triton_ops.probe")
    working = probe.probe
    monkeypatch.setattr(probe, "probe", Broken("CUDA error: out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        runtime.require(torch.device("cpu"))
    monkeypatch.setattr(probe, "probe", working)
    if runtime.interpreted():
        runtime.require(torch.device("cpu"))


def test_given_statistics_need_one_kernel_instead_of_three(by_name, monkeypatch):
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


def test_the_stride_of_a_single_frame_is_ignored():
    """A stride of 1 would be compiled in and make every load of the kernel narrow."""
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


def test_too_long_rows_are_refused(by_name):
    x = video(1, 8193, 1, 1, 1)
    with pytest.raises(BackendError, match="more than 8192 channels"):
        kernels.bias_residual(x)
