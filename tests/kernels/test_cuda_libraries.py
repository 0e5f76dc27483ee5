"""NVRTC, hiprtc and the drivers: which libraries are opened, and how their functions are called."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from fast_video_vae.kernels.cuda_ops import compiler, driver
from fast_video_vae.kernels.cuda_ops.driver import Boxes, Driver
from fast_video_vae.kernels.errors import Refusal

GPU = torch.device("cuda", 0)


class Known:
    """A compiler of some chips."""

    version, major = "nvrtc 12.8", 12

    def chips(self):
        return [75, 80, 86, 87, 89, 90, 100, 101]


@pytest.mark.parametrize(
    ("capability", "option"),
    [
        ((8, 9), "sm_89"),
        ((8, 8), "sm_86"),  # unknown: the last known chip of its generation before it
        ((10, 3), "sm_100"),  # 10.1 is a Jetson, whose code does not run elsewhere
        ((9, 0), "sm_90a"),  # the instructions of no other chip
        ((9, 1), "sm_90"),
        ((6, 1), None),
        ((12, 0), None),
    ],
)
def test_an_unknown_chip_runs_code_of_its_generation_or_is_refused(monkeypatch, capability, option):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if option:
        assert compiler.architecture(Known(), GPU) == f"--gpu-architecture={option}"
        monkeypatch.setattr(Known, "major", 11)  # does not know the "a"
        assert compiler.architecture(Known(), GPU).endswith(option.rstrip("a"))
    else:
        with pytest.raises(Refusal, match=r"^nvrtc 12\.8 knows no chip of compute capability"):
            compiler.architecture(Known(), GPU)


@pytest.mark.parametrize(
    ("platform", "cuda", "hip", "rtc", "library"),
    [
        ("linux", "11.8", None, "libnvrtc.so.11.2", "libcuda.so.1"),
        ("linux", "13.0", None, "libnvrtc.so.13", "libcuda.so.1"),
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
    """The functions of a driver, which return the `statuses` of a launch one after another."""

    def __init__(self, *statuses):
        self.calls, self.arguments, self.statuses = [], [], list(statuses)
        self._known = {}

    def __getattr__(self, name):
        if name not in self._known:

            def run(*given):
                self.calls.append((name, given))
                if "LaunchKernel" in name:  # whose arguments are valid until it returns
                    self.arguments.append(ctypes.string_at(given[-2][0], 8))
                if name.endswith("GetErrorString"):
                    given[1]._obj.value = b"an error"
                return self.statuses.pop(0) if "LaunchKernel" in name and self.statuses else 0

            self._known[name] = run
        return self._known[name]

    def names(self):
        return [name for name, _ in self.calls]


@pytest.mark.parametrize(
    ("hip", "launch"), [(False, "cuLaunchKernel"), (True, "hipModuleLaunchKernel")]
)
def test_a_launch_passes_grid_block_stream_and_arguments(hip, launch):
    functions, prefix = Functions(), "hip" if hip else "cu"
    module = Driver(functions, hip=hip).load(b"code", ["gate_rows", "other"], 0, 200_000)
    for _ in range(2):
        module.launch("gate_rows", 7, (32, 8), b"argument", 5)
    found = [f"{prefix}ModuleGetFunction", f"{prefix}FuncSetAttribute"] * 2
    assert functions.names() == [f"{prefix}ModuleLoadData", *found, launch, launch]
    assert functions.calls[2][1][1:] == (8, 200_000)
    *sizes, shared, stream, _, extra = functions.calls[5][1][1:]
    assert sizes == [7, 1, 1, 32, 8, 1]
    assert (shared, stream, extra) == (200_000, 5, None)
    assert functions.arguments == [b"argument"] * 2


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


def test_a_thread_without_a_context_enters_that_of_pytorch():
    functions = Functions(201, 0)
    module = Driver(functions, hip=False).load(b"code", ["gate_rows"], 3)
    module.launch("gate_rows", 1, (256, 1), b"", 0)
    launch, *entered = "cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"
    assert functions.names()[2:] == [launch, *entered, launch]
    assert functions.calls[3][1][1] == 3


@pytest.mark.parametrize(("hip", "status"), [(False, 719), (True, 201)])
def test_an_error_of_the_driver_has_its_number_and_text(hip, status):
    module = Driver(Functions(status), hip=hip).load(b"code", ["gate_rows"], 0)
    with pytest.raises(RuntimeError, match=rf"^the driver returned {status} \(an error\)$"):
        module.launch("gate_rows", 1, (256, 1), b"", 0)
