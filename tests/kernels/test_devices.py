"""Devices of all kinds: their memory, what they compute, and what a CPU convolves fast."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import int8_lacks, lacks, memory_bytes, product_dtype, tensor_limit
from fast_video_vae.kernels.devices import instructions, kinds, memory
from fast_video_vae.kernels.devices.instructions import multiplies_bfloat16, slow_on_cpu
from fast_video_vae.tests.played_devices import played

CPU, GIB = torch.device("cpu"), 1 << 30

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def cpu(monkeypatch):
    """Return a function that plays a CPU with features, and what oneDNN says of both dtypes."""

    def play(features, *, bf16=True, fp16=True):
        monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset(features))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        for name, answer in (("bf16", bf16), ("fp16", fp16)):
            query = None if answer is None else lambda answer=answer: answer
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", query)

    return play


@pytest.mark.parametrize(
    ("features", "answers", "bfloat16", "slow"),
    [
        ({"sse2", "avx512_f"}, {"fp16": False}, False, (False, True)),
        ({"sse2", "avx512_bf16", "avx512_fp16"}, {}, True, (False, False)),
        ({"sse2", "amx_bf16"}, {}, True, (False, True)),
        ({"sse2", "amx_tile"}, {}, True, (False, True)),
        ({"asimd", "bf16"}, {}, False, (False, False)),  # ARM
        ({"sse2", "avx512_bf16"}, {"bf16": None, "fp16": None}, False, (True, True)),  # older
    ],
)
def test_the_instructions_decide(cpu, features, answers, bfloat16, slow):
    cpu(features, **answers)
    assert multiplies_bfloat16() == bfloat16
    assert (slow_on_cpu(BF16), slow_on_cpu(FP16)) == slow


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Return a function that plays a device of a kind until the test ends."""
    contexts = []

    def begin(kind, **options):
        contexts.append(played(kind, monkeypatch, tmp_path, **options))
        return contexts[-1].__enter__().device

    yield begin
    for context in contexts:
        context.__exit__(None, None, None)


def test_the_memory_of_a_gpu_is_what_is_free_in_its_share(play, monkeypatch):
    device = play("nvidia")
    assert memory_bytes(device) == (6 * GIB, 8 * GIB)
    stats = {"reserved_bytes.all.current": 3 * GIB, "active_bytes.all.current": GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 8 * GIB))
    assert memory_bytes(device) == (4 * GIB, 8 * GIB)  # cached memory is free
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    assert memory_bytes(device) == (3 * GIB, 4 * GIB)
    stats["active_bytes.all.current"] = 5 * GIB
    assert memory_bytes(device) == (0, 4 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory_bytes(device) is None
    assert memory_bytes(CPU) is None
    assert tensor_limit(device, 2) == sys.maxsize


def test_the_memory_of_an_apple_gpu_is_a_share_of_the_hosts(play, monkeypatch):
    device = play("apple")
    for host, expected in ((None, 7), (9 * GIB, 7), (2 * GIB, 3)):  # 1 GiB is cached
        monkeypatch.setattr(memory, "host_bytes", lambda host=host: host)
        assert memory_bytes(device) == (expected * GIB, 8 * GIB)
    assert [tensor_limit(device, size) for size in (1, 2, 4)] == [2**31 - 1, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize(
    ("kind", "name", "traits"),
    [
        ("nvidia", "a GPU (nvidia)", (True, True, True, False, False)),
        ("amd", "a GPU (amd)", (True, True, True, True, True)),
        ("apple", "Apple GPU", (True, True, False, False, False)),
        (None, "cpu", (False, False, False, False, False)),
    ],
)
def test_the_traits_of_a_device(kind, name, traits, play, monkeypatch):
    device = play(kind) if kind else CPU
    monkeypatch.setattr(torch.backends, "miopen", None, raising=False)
    assert (kernels.device_kind(device), kernels.device_name(device)) == (kind or "cpu", name)
    asked = ("has_own_memory", "has_bfloat16", "sums_float64", "searches_shapes", "always_searches")
    assert tuple(getattr(kernels, each)(device) for each in asked) == traits
    assert product_dtype(device, torch.float16) == (
        torch.float16 if kind in ("nvidia", "amd") else torch.float32
    )
    reason = f"there is no int8 convolution for {name}"
    assert kind in (None, "nvidia") or int8_lacks(device, torch.float32) == reason


def test_what_a_device_does_not_compute(play, monkeypatch):
    device, dtypes = play("apple", macos=13), (torch.float32, torch.bfloat16, torch.float64)
    old = "bfloat16 needs macOS 14 or later on an Apple GPU"
    assert [lacks(device, dtype) for dtype in dtypes] == ["", old, "Apple GPUs have no float64"]
    assert not kernels.has_bfloat16(device)
    intel = torch.device("xpu", 0)
    monkeypatch.setattr(kinds, "device_name", lambda _: "Arc")
    for has, reason in ((False, "Arc has no float64"), (True, "")):
        found = SimpleNamespace(has_fp64=has)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _, found=found: found)
        assert lacks(intel, torch.float64) == reason
        assert lacks(intel, torch.bfloat16) == lacks(CPU, torch.float64) == ""


def test_a_gpu_gets_the_index_of_the_current_one(play, monkeypatch):
    play("nvidia")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for given, index in (("cuda", 3), ("cuda:1", 1), ("cpu", None), ("meta", None)):
        assert kernels.with_index(torch.device(given)).index == index
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.with_index(torch.device("cuda")).index is None


def test_nothing_is_searched_within_blocks_that_overlap(play, monkeypatch):
    device = play("amd")
    switches = SimpleNamespace(immediate=False)
    monkeypatch.setattr(torch.backends, "miopen", switches, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    state = lambda: (torch.backends.cudnn.benchmark, switches.immediate)  # noqa: E731
    assert not kernels.always_searches(device)
    first, second = kernels.unsearched(device), kernels.unsearched(device)
    with first:
        assert state() == (False, True)
        second.__enter__()
    assert state() == (False, True)  # the last one restores
    second.__exit__(None, None, None)
    with kernels.unsearched(CPU):
        assert state() == (True, False)
    monkeypatch.setattr(torch.backends, "miopen", None)  # of an older PyTorch
    assert kernels.always_searches(device)
    monkeypatch.setenv("MIOPEN_FIND_MODE", "fast")
    assert not kernels.always_searches(device)
