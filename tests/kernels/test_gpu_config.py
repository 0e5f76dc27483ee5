"""The measured properties of a device, and what happens where they cannot be measured."""

import dataclasses
import logging
import math
import threading
import time

import pytest
import torch

from fast_video_vae.kernels import cache
from fast_video_vae.kernels.devices.gpu_config import GPUConfig, gpu_config
from fast_video_vae.kernels.probes.probe import GRID
from fast_video_vae.tests.kernels.probe_clock import clock, gpu_config_module  # noqa: F401

CPU = torch.device("cpu")
H100 = GPUConfig("H100", (9, 0), torch.bfloat16, 4e14, 3.25, True, False, "as PyTorch is set")

ERRORS = [
    NotImplementedError("no addmm for this dtype"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    TypeError("Cannot convert a MPS Tensor to float64"),
]


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A new process with an empty folder, and the real clock."""
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu_config_module, "_known", {})


def stored():
    return sorted(cache.folder("facts").glob("*.json"))


def test_a_cpu_is_measured_and_has_no_capability(empty):
    config = gpu_config(CPU, torch.float32)
    assert config.name == "cpu"
    assert config.capability is None
    assert not config.native_fp8
    assert not config.reduced_precision
    # About a millionth and a million times the rate of one core.
    assert 1e4 < config.products_per_s < 1e16
    assert config.products_per_s == float(f"{config.products_per_s:.1e}")
    assert config.stream_c in GRID
    start = time.perf_counter()
    assert gpu_config(CPU, torch.float32) is config
    assert time.perf_counter() - start < 0.01


def test_a_device_is_measured_once_for_each_dtype(clock):  # noqa: F811
    config = gpu_config(CPU, torch.float32)
    assert gpu_config(CPU, torch.float32) is config
    count = len(clock.asked)
    assert gpu_config(CPU) is gpu_config(CPU, torch.bfloat16) is not config
    assert gpu_config(CPU).dtype == torch.bfloat16
    assert len(clock.asked) == 2 * count
    assert len(stored()) == 2


def test_threads_that_ask_at_once_share_one_probe(clock):  # noqa: F811
    clock.does = lambda: time.sleep(0.05)
    start, found = threading.Barrier(8), []

    def ask():
        start.wait()
        found.append(gpu_config(CPU, torch.float32))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
    assert len(clock.asked) == 2  # the first layer, then all


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_not_measured(empty, dtype):
    config = gpu_config(CPU, dtype)
    assert config.products_per_s == 0
    assert config.stream_c == 4.0  # a weight read and written twice
    assert f"{str(dtype)[6:]} products: not measured" in config.lines()
    assert not stored()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failure_means_the_default_and_is_not_stored(clock, caplog, error):  # noqa: F811
    def fail():
        raise error

    clock.does = fail
    with caplog.at_level(logging.INFO):
        config = gpu_config(CPU, torch.float32)
    assert (config.products_per_s, config.stream_c) == (0, 4.0)
    assert gpu_config(CPU, torch.float32) is config  # the decision stays in this process
    assert not caplog.messages
    assert not stored()
    clock.restart()
    clock.does = lambda: None
    assert gpu_config(CPU, torch.float32).stream_c == 2.0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-20, 1e12])
def test_impossible_times_mean_the_default_and_are_not_stored(clock, scale):  # noqa: F811
    clock.scale = scale
    config = gpu_config(CPU, torch.float32)
    assert (config.products_per_s, config.stream_c) == (0, 4.0)
    assert not stored()


def test_a_meta_device_is_not_measured(clock):  # noqa: F811
    config = gpu_config(torch.device("meta"))
    assert (config.capability, config.products_per_s, config.stream_c) == (None, 0, 4.0)
    assert not clock.asked
    assert not stored()


def test_a_probe_leaves_the_random_numbers_of_the_process(empty):
    state = torch.get_rng_state()
    gpu_config(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_lines_describe_the_device():
    assert H100.lines() == [
        "H100, compute capability 9.0",
        "bfloat16 products: 800.00 TFLOPS, measured",
        "fp8 products: yes",
        "LoRA mode auto: stream from 3.25 * in * out / (in + 2 out) tokens",
        "sums of bf16 products: in float32, as PyTorch is set",
    ]
    cpu = dataclasses.replace(H100, capability=None, native_fp8=False, reduced_precision=True)
    assert cpu.lines()[0] == "H100, compute capability none"
    assert cpu.lines()[2] == "fp8 products: no"
    assert cpu.lines()[4] == "sums of bf16 products: reduced, as PyTorch is set"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("allowed", [False, True])
def test_properties_of_a_gpu_are_those_of_torch(empty, allowed):
    device = torch.device("cuda", 0)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        config = gpu_config(device)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    assert config.name == torch.cuda.get_device_name(device)
    assert config.capability == torch.cuda.get_device_capability(device)
    assert config.native_fp8 == (config.capability >= (8, 9))
    assert config.reduced_precision is allowed
    assert config.stream_c in GRID
    assert len(stored()) == 1
