"""The measured properties of a device, and their cache."""

import dataclasses
import math
import time

import pytest
import torch

from fast_video_vae.kernels.gpu_config import GPUConfig, gpu_config

CPU = torch.device("cpu")
H100 = GPUConfig("H100", (9, 0), torch.bfloat16, 4e14, 3.25, True, False, "as PyTorch is set")


def test_a_cpu_is_measured_and_has_no_capability():
    gpu_config.cache_clear()
    config = gpu_config(CPU, torch.float32)
    assert config.name == "cpu"
    assert config.capability is None
    assert not config.native_fp8
    assert not config.reduced_precision
    # About a millionth and a million times the rate of one core.
    assert 1e4 < config.products_per_s < 1e16
    assert 0 < config.stream_c < math.inf


def test_a_device_is_measured_once_for_each_dtype():
    config = gpu_config(CPU, torch.float32)
    start = time.perf_counter()
    assert gpu_config(CPU, torch.float32) is config
    assert time.perf_counter() - start < 0.01
    assert gpu_config(CPU, torch.bfloat16) is not config
    assert gpu_config(CPU).dtype == torch.bfloat16


def test_unsupported_dtypes_are_not_measured():
    config = gpu_config(torch.device("cpu"), torch.uint16)
    assert config.products_per_s == 0
    assert config.stream_c == 4.0  # a weight read and written twice
    assert "uint16 products: not measured" in config.lines()


def test_a_meta_device_raises_no_error():
    assert gpu_config(torch.device("meta")).capability is None


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
def test_properties_of_a_gpu_are_those_of_torch(allowed):
    device = torch.device("cuda", 0)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = allowed
    gpu_config.cache_clear()
    try:
        config = gpu_config(device)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        gpu_config.cache_clear()
    assert config.name == torch.cuda.get_device_name(device)
    assert config.capability == torch.cuda.get_device_capability(device)
    assert config.native_fp8 == (config.capability >= (8, 9))
    assert config.reduced_precision is allowed
    assert 0.1 < config.stream_c < 1000
