"""The CUDA backend from the sources to a launch: the cache on disk, and what is missing or fails.

The compiler and the driver are stand-ins, because no machine without a GPU has both. The binaries
that they exchange name a source and its options, and the emulator runs it.
"""

import errno
import json
import logging
import os
import shutil
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, cache, errors, use_backend
from fast_video_vae.kernels.cuda_ops import arguments, binaries, compiler, driver, runtime
from fast_video_vae.kernels.cuda_ops.compiler import Binary, CompileError
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import missing, random, video
from fast_video_vae.tests.kernels.emulator import library as emulator

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of the emulator need Linux")
def test_the_emulator_runs_where_there_is_a_compiler():
    """Otherwise the tests of the ops would skip it silently."""
    if shutil.which(emulator.compiler()[0]) and not torch.cuda.is_available():
        assert missing("cuda") is None


class StandIn:
    """A compiler and a driver; `compiled` and `loads` are the names of the sources."""

    version = "nvrtc 13.0"

    def __init__(self):
        self.compiled, self.loads, self.options = [], [], []
        self.compiler_error = self.driver_error = None

    def chips(self):
        return [75, 80, 86, 89, 90]

    def compile(self, text, headers, options, name):
        if self.compiler_error:
            raise self.compiler_error
        self.compiled.append(name)
        self.options.append(options)
        return Binary(json.dumps([name, options]).encode(), "")

    def load(self, code, kernels, device, shared):
        if self.driver_error:
            raise self.driver_error
        name, options = json.loads(code)
        assert kernels == ["gate_rows"]
        self.loads.append(name)
        macros = [option.removeprefix("-DFVV_").split("=") for option in options if "=" in option]
        constants = [tuple(each) for each in macros if not each[0].startswith("-")]
        return emulator.compiled(name.removesuffix(".cu"), frozenset(constants))


class Machine:
    """A machine with a GPU; `restart` begins a new process."""

    def __init__(self, monkeypatch, folder):
        self._patch, self.folder = monkeypatch, folder
        self.made = StandIn()
        refuse = runtime.refuse_device
        monkeypatch.setattr(runtime, "refuse_device", lambda _: refuse(GPU))
        monkeypatch.setattr(runtime, "here", lambda _: nullcontext())
        monkeypatch.setattr(runtime, "stream", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(runtime, "compiler", lambda: self.made)
        monkeypatch.setattr(runtime, "driver", lambda: self.made)
        # The emulator keeps its own libraries.
        compiled, constants = emulator.compiled, {"DTYPE": "float", "PACK": 4}
        compiled("silu_mul", frozenset((name, str(value)) for name, value in constants.items()))
        monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(folder))
        self.restart()

    def restart(self):
        self.made = StandIn()
        self._patch.setattr(runtime, "_modules", {})
        self._patch.setattr(compiler, "_found", None)
        self._patch.setattr(errors, "_logged", set())
        self._patch.setattr(runtime, "_failed", [])

    def files(self):
        return sorted(self.folder.rglob("*.*"))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    if reason := missing("cuda") or (torch.cuda.is_available() and "the stand-ins need the CPU"):
        pytest.skip(reason)
    missing("native")  # built outside of the folder of this test, if it is not there yet
    return Machine(monkeypatch, tmp_path / "cache")


def gated(backend="cuda"):
    """Run a gate on a backend, or on any, and compare it with the formula."""
    rows = random(4, 16)
    with use_backend(backend) if backend else nullcontext():
        formulas.holds("silu_mul", rows, rows)


def refused(reason):
    """Check the reason why the backend refuses a gate, which another one runs."""
    rows = random(4, 16)
    with use_backend("cuda"), pytest.raises(BackendError) as error:
        kernels.silu_mul(rows, rows)
    assert error.value.reasons == {"cuda": reason}
    gated(None)


def test_a_first_call_compiles_and_a_second_process_reads_the_binary(machine):
    for _ in range(2):
        gated()
    assert machine.made.compiled == ["silu_mul.cu"]
    assert machine.made.options[0] == [
        "--gpu-architecture=sm_89", "-std=c++17", "-DFVV_DTYPE=float", "-DFVV_PACK=4",
    ]  # fmt: skip
    (path,) = machine.files()
    assert path.suffix == ".bin"
    machine.restart()
    gated()
    assert machine.made.compiled == []
    assert machine.made.loads == ["silu_mul.cu"]
    assert machine.files() == [path]
    machine.restart()
    machine.made.version = "nvrtc 13.1"
    gated()
    assert machine.made.compiled == ["silu_mul.cu"]
    assert len(machine.files()) == 2


@pytest.mark.parametrize("damage", ["cut", "one byte", "empty", "another file", "a folder"])
def test_a_damaged_file_is_made_again(machine, damage, caplog):
    gated()
    (path,) = machine.files()
    whole = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        changed = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
        damaged = {"cut": whole[:-1], "one byte": changed, "empty": b""}
        path.write_bytes(damaged.get(damage, b"PK" * 100))
    machine.restart()
    with caplog.at_level(logging.WARNING):
        gated()
    assert machine.made.compiled == ["silu_mul.cu"]
    assert len(caplog.messages) == (damage == "a folder")
    assert damage == "a folder" or path.read_bytes() == whole


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


@pytest.mark.parametrize("cause", ["full", "a file", "no home"])
def test_a_folder_that_cannot_be_written_costs_one_line(machine, cause, monkeypatch, caplog):
    """Every start compiles then."""

    def denied(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    if cause == "full":
        monkeypatch.setattr(os, "fdopen", denied)
    elif cause == "a file":
        machine.folder.write_text("")
    else:
        for name in ("FAST_VIDEO_VAE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        gated()
        runtime._modules.clear()
        gated()
    assert machine.made.compiled == ["silu_mul.cu"] * 2
    (line,) = caplog.messages
    assert "not writable" in line
    assert cause == "no home" or "FAST_VIDEO_VAE_CACHE" in line
    assert cause != "full" or "(No space left on device)" in line
    assert not [path for path in machine.files() if path.is_file()]


def test_a_file_that_is_replaced_is_whole_at_any_time(tmp_path, monkeypatch):
    path, replace = tmp_path / "one.bin", Path.replace
    old, young = tmp_path / "a-1.tmp", tmp_path / "a-2.tmp"  # of a killed process, and of another
    for each in (old, young):
        each.touch()
    os.utime(old, (0, 0))
    cache.replace(path, b"old")
    assert sorted(tmp_path.iterdir()) == [young, path]
    young.unlink()
    seen = []

    def look(self, target):
        seen.append((self.read_bytes(), path.read_bytes()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    cache.replace(path, b"new content")
    assert seen == [(b"new content", b"old")]
    assert path.read_bytes() == b"new content"

    def fail(self, target):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Permission denied"):
        cache.replace(path, b"newer")
    assert path.read_bytes() == b"new content"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("compiler_error", CompileError("silu_mul.cu(3): error: no such type")),
        ("driver_error", RuntimeError("the driver returned 209 (no kernel image)")),
    ],
)
def test_what_fails_for_every_source_is_refused_with_one_line(machine, part, error, caplog):
    setattr(machine.made, part, error)
    x = video(1, 8, 2, 3, 4)
    calls = {
        "silu_mul": ("silu_mul", (x.movedim(1, -1), x.movedim(1, -1))),
        "rms_norm": ("rms_norm_silu", (x, torch.ones(8))),
        "spread": ("interleave_time", (x, 2)),
    }
    with caplog.at_level(logging.WARNING):
        for source, (op, args) in (*calls.items(), *calls.items()):
            with use_backend("cuda"), pytest.raises(BackendError) as caught:
                getattr(kernels, op)(*args)
            assert caught.value.reasons == {"cuda": f"its kernels for {source} failed ({error})"}
        gated(None)
    (line,) = caplog.messages
    assert f"its kernels failed ({error})" in line


def test_memory_that_runs_out_while_a_binary_loads_is_not_remembered(machine, caplog):
    machine.made.driver_error = RuntimeError("the driver returned 2 (out of memory)")
    rows = random(4, 16)
    with caplog.at_level(logging.WARNING):
        with use_backend("cuda"), pytest.raises(RuntimeError, match="out of memory"):
            kernels.silu_mul(rows, rows)
        machine.made.driver_error = None
        gated()
    assert not caplog.messages


def test_nothing_is_loaded_while_a_graph_is_captured(machine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refused("nothing is loaded while a CUDA graph is captured")
    gated()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gated()


def test_a_machine_without_cuda_is_refused_without_a_line(machine, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "driver", driver.driver.__wrapped__)
            patch.setattr(driver, "opened", lambda _: None)
            refused("the driver's library libcuda.so.1 does not load")
        machine.restart()
        monkeypatch.setattr(runtime, "compiler", compiler.compiler)
        monkeypatch.setattr(torch.version, "cuda", None)
        refused("this PyTorch is built without CUDA")
    assert not caplog.messages


@pytest.mark.parametrize("library", [None, object()])
def test_a_missing_or_broken_compiler_is_refused_with_one_line(
    machine, monkeypatch, caplog, library
):
    opened = []
    monkeypatch.setattr(runtime, "compiler", compiler.compiler)
    monkeypatch.setattr(compiler, "opened", lambda names: opened.append(names) or library)
    reason = "there is no libnvrtc.so.13" if library is None else "has no attribute 'nvrtcVersion'"
    rows = random(4, 16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with use_backend("cuda"), pytest.raises(BackendError, match=reason):
                kernels.silu_mul(rows, rows)
            gated(None)
            runtime._modules.clear()  # another source asks again
    (line,) = caplog.messages
    assert reason in line
    assert "install PyTorch again" in line
    assert len(opened) == 1


def test_the_backend_can_be_disabled(monkeypatch):
    runtime.refuse_device(GPU)
    monkeypatch.setenv("FAST_VIDEO_VAE_CUDA", "0")
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_CUDA=0 disables it"):
        runtime.refuse_device(GPU)
    for name in ("cuda", "hopper"):
        with use_backend(name):
            runtime.refuse_device(GPU)


def test_kernels_run_on_the_device_and_the_current_stream_of_the_tensors(monkeypatch):
    current, launched, loads = [0], [], []

    @contextmanager
    def entered(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    def load(_, __, device):
        loads.append(device.index)
        return SimpleNamespace(launch=lambda *given: launched.append((current[0], given[-1])))

    def stream(device):
        return SimpleNamespace(cuda_stream=70 + device.index)

    for name, value in (
        ("device", entered), ("current_device", lambda: current[0]), ("current_stream", stream),
        ("is_current_stream_capturing", lambda: False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(runtime, "_modules", {})
    monkeypatch.setattr(runtime, "_load", load)
    for index in (0, 1, 0, 1):
        like = SimpleNamespace(device=torch.device("cuda", index), dtype=torch.float32)
        runtime.launch("silu_mul", "gate_rows", like, 1, (256, 1), b"", PACK=4)
    assert launched == [(0, 70), (1, 71)] * 2
    assert loads == [0, 1]


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
