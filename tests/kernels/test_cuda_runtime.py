"""The CUDA backend from the sources to a launch: libraries, binaries, and what is missing or fails.

The compiler and the driver are stand-ins, because no machine without a GPU has both.
"""

import ctypes
import errno
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_video_vae.kernels import cache, errors, use_backend
from fast_video_vae.kernels.cuda_ops import arguments, binaries, compiler, driver, runtime
from fast_video_vae.kernels.cuda_ops.compiler import Binary, CompileError
from fast_video_vae.kernels.cuda_ops.driver import Boxes, Driver
from fast_video_vae.kernels.errors import Refusal

GPU = torch.device("cuda", 0)


class StandIn:
    """A compiler and a driver, whose binaries are the options of the compiler."""

    version, error = "nvrtc 13.0", None

    def __init__(self):
        self.compiled = []

    def chips(self):
        return [75, 80, 86, 89, 90]

    def compile(self, text, headers, options, name):
        if isinstance(self.error, CompileError):
            raise self.error
        self.compiled.append(name)
        return Binary(" ".join(options).encode(), "")

    def load(self, code, kernels, device, shared):
        if self.error:
            raise self.error
        return code.decode(), kernels, device, shared


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Stand in for the compiler and the driver of a GPU in a new process with an empty cache."""
    made = StandIn()
    for where, name, value in (
        (runtime, "compiler", lambda: made), (runtime, "driver", lambda: made),
        (runtime, "_modules", {}), (errors, "_logged", set()),
        (torch.cuda, "get_device_capability", lambda _: (8, 9)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.version, "cuda", "13.0"), (torch.version, "hip", None),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path / "cache"))
    return made


def loaded(source="silu_mul", device=GPU):
    return runtime.loaded(source, {"PACK": 8, "DTYPE": "half"}, device)


def test_a_first_call_compiles_and_a_second_process_reads_the_binary(made, tmp_path):
    options = "--gpu-architecture=sm_89 -std=c++17 -DFVV_DTYPE=half -DFVV_PACK=8"
    for _ in range(2):
        for index in (0, 1, 0):
            found = loaded(device=torch.device("cuda", index))
            assert found == (options, ["gate_rows"], index, 0)
        assert made.compiled == ["silu_mul.cu"]
        runtime._modules.clear()  # as in another process
    made.version = "nvrtc 13.1"
    loaded()
    assert len(made.compiled) == len([*tmp_path.rglob("*.bin")]) == 2


def test_a_damaged_file_is_made_again(made, tmp_path):
    found = loaded()
    (path,) = tmp_path.rglob("*.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    runtime._modules.clear()
    assert loaded() == found
    assert len(made.compiled) == 2
    assert path.read_bytes() == whole


def test_all_that_a_binary_is_made_from_is_in_its_key(monkeypatch, tmp_path):
    for name in ("silu_mul.cu", "rms_norm.cu"):
        (tmp_path / name).write_text(name)
    headers = {"frames.cuh": "a"}
    monkeypatch.setattr(binaries, "SOURCES", tmp_path)
    monkeypatch.setattr(binaries, "headers", lambda: headers)

    def key(source="silu_mul", chip="sm_89", version="nvrtc 13.0", **constants):
        given = binaries.options(constants or {"PACK": 4, "DTYPE": "half"}, chip)
        return binaries.key(source, (*given, version))

    assert key(DTYPE="half", PACK=4) == key()
    keys = [key(), key("rms_norm"), key(chip="sm_90"), key(version="nvrtc 13.1"), key(PACK=8)]
    headers["frames.cuh"] = "b"
    keys.append(key())
    (tmp_path / "silu_mul.cu").write_text("changed")
    assert len({*keys, key()}) == len(keys) + 1


@pytest.mark.parametrize(
    ("system", "variables", "folder"),
    [
        ("linux", {}, "/home/a/.cache/fast-video-vae/x"),
        ("linux", {"XDG_CACHE_HOME": "/b"}, "/b/fast-video-vae/x"),
        ("darwin", {}, "/home/a/Library/Caches/fast-video-vae/x"),
        ("darwin", {"FAST_VIDEO_VAE_CACHE": "/c"}, "/c/x"),
    ],
)
def test_the_folder_of_what_is_made_is_that_of_the_platform(system, variables, folder, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/a"))
    for name in ("FAST_VIDEO_VAE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.folder("x") == Path(folder)


def test_a_file_is_whole_at_any_time_and_leaves_nothing_else(tmp_path, monkeypatch, caplog):
    path, old, young = (tmp_path / name for name in ("a.bin", "building-1", "building-2"))
    for each in (old, young):  # of a killed process, and of another
        each.mkdir()
    os.utime(old, (0, 0))
    cache.keep(path, b"old", "")
    assert sorted(tmp_path.iterdir()) == [path, young]

    def fail(made, target):
        assert (made.read_bytes(), target.read_bytes()) == (b"new", b"old")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    cache.keep(path, b"new", "compiles its kernels")
    assert "(No space left on device), so every start compiles its kernels again" in caplog.text
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [path, young]


@pytest.mark.parametrize("error", [CompileError("no such type"), RuntimeError("no image")])
def test_what_fails_for_every_source_is_refused_with_one_line(made, error, caplog):
    made.error = error
    for source in ("silu_mul", "rms_norm", "spread") * 2:
        with pytest.raises(Refusal) as caught:
            loaded(source)
        assert str(caught.value) == f"its kernels for {source} failed ({error})"
    (line,) = caplog.messages
    assert f"its kernels failed ({error})" in line


def test_memory_that_runs_out_while_a_binary_loads_is_not_remembered(made, caplog):
    made.error = RuntimeError("the driver returned 2 (out of memory)")
    with pytest.raises(RuntimeError, match="out of memory"):
        loaded()
    made.error = None
    loaded()
    assert not caplog.messages


def test_nothing_is_loaded_while_a_graph_is_captured(made, monkeypatch):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(Refusal, match="nothing is loaded while a CUDA graph is captured"):
        loaded()
    capturing[0] = False
    found = loaded()
    capturing[0] = True
    assert loaded() == found


def test_what_is_missing_is_refused_and_a_compiler_costs_a_line(made, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "compiler", compiler.compiler.__wrapped__)
    monkeypatch.setattr(compiler, "opened", lambda _: None)
    for _ in range(2):
        with pytest.raises(Refusal, match=r"^the compiler libnvrtc\.so\.13 does not load$"):
            loaded()
        runtime._modules.clear()  # another source asks again
    (line,) = caplog.messages
    assert line.endswith("so GPUs run without the backend cuda; install PyTorch again")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Refusal, match="this PyTorch is built without CUDA"):
        loaded()
    monkeypatch.setattr(driver, "opened", lambda _: None)
    with pytest.raises(Refusal, match=r"library libcuda\.so\.1 does not load"):
        driver.driver.__wrapped__()


def test_the_backend_can_be_disabled(monkeypatch):
    runtime.refuse_device(GPU)
    monkeypatch.setenv("FAST_VIDEO_VAE_CUDA", "0")
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_CUDA=0 disables it"):
        runtime.refuse_device(GPU)
    for name in ("cuda", "hopper"):
        with use_backend(name):
            runtime.refuse_device(GPU)


def test_kernels_run_on_the_device_and_the_current_stream_of_the_tensors(monkeypatch):
    current, launched = [0], []

    @contextmanager
    def entered(device):
        current[0] = device.index
        yield
        current[0] = 0

    module = SimpleNamespace(launch=lambda *given: launched.append((current[0], given[-1])))
    stream_of = lambda device: SimpleNamespace(cuda_stream=70 + device.index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(runtime, "loaded", lambda *_: module)
    for index in (0, 1, 0):
        like = SimpleNamespace(device=torch.device("cuda", index), dtype=torch.float32)
        runtime.launch("silu_mul", "gate_rows", like, 1, (256, 1), b"", PACK=4)
    assert launched == [(0, 70), (1, 71), (0, 70)]


@settings(deadline=None)
@given(by=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
@example(by=1, n=2**31 - 1)
@example(by=2**31 - 1, n=2**31 - 1)
@example(by=2**30 + 1, n=2**31 - 1)
def test_divisors_divide_every_count(by, n):
    """The arithmetic of `divide` in frames.cuh, in 32 bits."""
    _, (same, magic, shift) = arguments.divisor(by)
    assert same == by
    assert magic < 2**32
    total = (n * magic >> 32) + n
    assert total < 2**32
    assert total >> shift == n // by
    if by == 1:
        with pytest.raises(Refusal, match="31 bits"):
            arguments.divisor(2**31)


@pytest.mark.parametrize(
    ("capability", "option"),
    [
        ((8, 9), "sm_89"),
        ((8, 8), "sm_86"),  # unknown: the last known chip of its generation before it
        ((10, 3), "sm_100"),  # 10.1 is a Jetson, whose code does not run elsewhere
        ((9, 0), "sm_90a"),  # the instructions of no other chip
        ((6, 1), None),
        ((12, 0), None),
    ],
)
def test_an_unknown_chip_runs_code_of_its_generation_or_is_refused(monkeypatch, capability, option):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    chips = [75, 80, 86, 87, 89, 90, 100, 101]
    known = SimpleNamespace(version="nvrtc 12.8", major=12, chips=lambda: chips)
    if option:
        assert compiler.architecture(known, GPU) == f"--gpu-architecture={option}"
        known.major = 11  # does not know the "a"
        assert compiler.architecture(known, GPU).endswith(option.rstrip("a"))
    else:
        with pytest.raises(Refusal, match=r"^nvrtc 12\.8 knows no chip of compute capability"):
            compiler.architecture(known, GPU)


@pytest.mark.parametrize(
    ("platform", "cuda", "hip", "rtc", "library"),
    [
        ("linux", "11.8", None, "libnvrtc.so.11.2", "libcuda.so.1"),
        ("win32", "12.8", None, "nvrtc64_120_0.dll", "nvcuda.dll"),
        ("linux", None, "6.4.43482", "libhiprtc.so", "libamdhip64.so"),
        ("win32", None, "7.1.5", "hiprtc0701.dll", "amdhip64_7.dll"),
    ],
)
def test_the_libraries_of_each_platform(monkeypatch, platform, cuda, hip, rtc, library):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert compiler._names()[0] == rtc
    assert driver._names(hip)[0] == library


def test_the_library_next_to_pytorch_comes_before_the_system(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    path, builtins = (str(folder / name) for name in ("libx.so", "libnvrtc-builtins.so.13.0"))
    for place in (path, builtins):
        Path(place).touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    tried, broken = [], set()

    def load(place):
        tried.append(place)
        if place in broken:
            raise OSError("does not load")
        return place

    monkeypatch.setattr(ctypes, "CDLL", load)
    # Another version of the system is not used where PyTorch has a library under another name.
    assert compiler.opened(["liby.so", "libx.so"]) == path
    assert tried == [path, builtins]  # which NVRTC 13.0 does not find itself
    broken.add(path)
    assert compiler.opened(["libx.so", "liby.so"]) == "libx.so"


class Functions:
    """The functions of a driver, whose launches return `statuses` one after another."""

    def __init__(self, *statuses):
        self.calls, self.statuses = [], list(statuses)

    def __getattr__(self, name):
        def run(*given):
            self.calls.append((name, given[1:]))
            if name.endswith("GetErrorString"):
                given[1]._obj.value = b"an error"
            if "LaunchKernel" not in name:
                return 0
            assert ctypes.string_at(given[-2][0], 8) == b"argument"
            return self.statuses.pop(0)

        return run


@pytest.mark.parametrize("prefix", ["cu", "hip"])
def test_a_launch_passes_its_arguments_and_an_error_has_number_and_text(prefix):
    """A thread without a context enters that of PyTorch on an NVIDIA GPU, and launches again."""
    functions = Functions(*((201, 0, 719) if prefix == "cu" else (719,)))
    module = Driver(functions, hip=prefix == "hip").load(b"code", ["gate_rows"], 3, 200_000)
    assert functions.calls[2] == (f"{prefix}FuncSetAttribute", (8, 200_000))
    if prefix == "cu":
        module.launch("gate_rows", 7, (32, 8), b"argument", 5)
        assert functions.calls[4] == ("cuDevicePrimaryCtxRetain", (3,))
    with pytest.raises(RuntimeError, match=r"^the driver returned 719 \(an error\)$"):
        module.launch("gate_rows", 7, (32, 8), b"argument", 5)
    *given, _, extra = functions.calls[3][1]
    assert (given, extra) == ([7, 1, 1, 32, 8, 1, 200_000, 5], None)


def test_a_tensor_map_is_aligned_and_described_as_by_the_manual():
    functions, made = Functions(), []

    def encode(place, kind, rank, address, *given):
        assert place.value % 128 == 0
        ctypes.memset(place, 7, 128)
        made.append((kind, rank, address.value, *map(tuple, given[:4]), *given[4:]))
        return 0

    functions.cuTensorMapEncodeTiled = encode
    boxes = Boxes(64, 9, (96, 18), (192,), (32, 16), 2, 0)
    assert Driver(functions, hip=False).tensor_map(boxes) == b"\7" * 128
    assert made == [(9, 2, 64, (96, 18), (192,), (32, 16), (1, 1), 0, 2, 3, 0)]
