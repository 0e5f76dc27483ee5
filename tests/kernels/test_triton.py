"""The Triton backend without a GPU: refusals and failures."""

import importlib
import logging
import re

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, dispatch, errors, modules, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import runtime, tiles
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import random, video

ops = importlib.import_module("fast_video_vae.kernels.triton_ops.ops")


class Broken:
    """A kernel whose launches fail with `error`; `tries` counts them."""

    __name__ = "_broken_kernel"

    def __init__(self, error="no compiler\nand a long story"):
        self.tries, self._error = 0, error

    def __getitem__(self, grid):
        def start(*args, **constants):
            self.tries += 1
            raise RuntimeError(self._error)

        return start


def test_devices_and_dtypes_are_refused_with_a_reason(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Refusal, match="the tensors are on cpu; triton needs an NVIDIA"):
        modules.ask("triton", "silu_mul", *torch.ones(2, 2, 8))
    with pytest.raises(Refusal, match="TRITON_INTERPRET=1"):
        runtime.refuse_device(device, torch.float32)
    monkeypatch.delenv("TRITON_INTERPRET")
    runtime.refuse_device(device, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    for dtype in (torch.float32, torch.float16):
        runtime.refuse_device(device, dtype)
    with pytest.raises(Refusal, match=r"needs compute capability 8\.0; this GPU has 7\.5"):
        runtime.refuse_device(device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    runtime.refuse_device(device, torch.bfloat16)
    monkeypatch.setenv("FAST_VIDEO_VAE_TRITON", "0")
    with pytest.raises(Refusal, match="FAST_VIDEO_VAE_TRITON=0 disables it"):
        runtime.refuse_device(device, torch.float32)
    with use_backend("triton"):
        runtime.refuse_device(device, torch.float32)


@pytest.fixture
def lines(caplog, monkeypatch):
    """The warnings of a new process."""
    monkeypatch.setattr(errors, "_logged", set())
    with caplog.at_level(logging.WARNING):
        yield lambda: caplog.messages


NONE = ModuleNotFoundError("no", name="triton")
BROKEN = OSError("bad\nDLL")


@pytest.mark.parametrize(
    ("error", "reason", "advice"),
    [
        (NONE, "triton is not installed", "pip install triton"),
        (BROKEN, "triton does not load (OSError: bad)", "install a Triton that matches"),
    ],
)
def test_a_triton_that_does_not_load_is_logged_once(error, reason, advice, monkeypatch, lines):
    real = importlib.import_module

    def lacking(name, package=None):
        if package == ops.__package__:
            raise error
        return real(name, package)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.ones(2, 8)
    with monkeypatch.context() as patch, use_backend("triton"):
        patch.setattr(importlib, "import_module", lacking)
        ops.launches.cache_clear()
        for _ in range(2):
            with pytest.raises(BackendError, match=re.escape(f"(triton: {reason})")):
                kernels.silu_mul(x, x)
    (line,) = lines()
    assert f"{reason}, so other kernels are used" in line
    assert advice in line


def test_another_backend_runs_after_a_failed_launch(on_triton, monkeypatch, lines):
    """The tail is unchanged, and other kernels run."""
    norms, broken = importlib.import_module(f"{ops.__package__}.norms"), Broken()
    monkeypatch.setattr(norms, "_norm", broken)
    monkeypatch.setattr(dispatch, "_order", lambda *_: (("triton", "reference"), True))
    x, gamma = video(1, 16, 2, 3, 5), random(16, seed=1)
    for _ in range(2):
        tail = video(1, 16, 2, 3, 5, seed=2)
        before = tail.clone()
        y = kernels.rms_norm_silu(x, gamma, tail=tail)
        assert torch.equal(y[:, :, :2], before)
        assert torch.equal(tail, y[:, :, 2:])
        formulas.check(tail, *formulas.rms_norm_silu(x, gamma))
    assert broken.tries == 2
    (line,) = lines()
    assert "Triton cannot run kernels on cpu" in line
    assert "(RuntimeError: no compiler)" in line
    assert "C compiler" in line
    with use_backend("triton"):
        formulas.holds("silu_mul", x.movedim(1, -1), x.movedim(1, -1))


def test_a_launch_without_memory_is_no_refusal(lines):
    broken = Broken("Triton Error [CUDA]: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        runtime.launch(broken, (1,), torch.ones(4))
    assert not lines()


def test_the_stride_of_a_single_frame_is_ignored():
    """A stride of 1 would be compiled in and make every load of the kernel narrow."""
    x = torch.empty_strided((1, 8, 1, 2, 3), (1, 1, 1, 24, 8))
    assert tiles.strides(x) == (0, 0)
    assert tiles.strides(video(2, 8, 3, 2, 3)) == (3 * 48, 48)


def test_a_load_has_as_many_values_as_all_memory_is_aligned_to():
    x = torch.zeros(2 * 2 * 3 * 16 + 8)
    aligned = x[: 2 * 2 * 3 * 16].view(2, 2, 1, 3, 16).movedim(-1, 1)
    shifted = x[4 : 4 + 2 * 2 * 3 * 16].view(2, 2, 1, 3, 16).movedim(-1, 1)
    skipping = x[: 2 * 98].as_strided((2, 16, 1, 1, 3), (98, 1, 98, 48, 16))
    for unit, channels, tensors in (
        (8, 16, [aligned]), (4, 12, [aligned]), (4, 16, [aligned, shifted]), (2, 16, [skipping]),
    ):  # fmt: skip
        assert tiles.unit_of(8, channels, *tensors) == unit
    assert tiles.given(None, x, x) == 6


def test_more_channels_than_a_tile_holds_are_refused(on_triton):
    with use_backend("triton"), pytest.raises(BackendError, match="more than 8192 channels"):
        kernels.bias_residual(video(1, 8193, 1, 1, 1))


def test_more_frames_or_pixels_than_a_grid_counts_are_refused():
    for reason, shape in (
        ("more than 65535 frames or videos", (1, 1, 65536, 1, 1)),
        ("more than 65535 frames or videos", (65536, 1, 1, 1, 1)),
        ("more pixels per frame than 31 bits count", (1, 1, 1, 1 << 16, 1 << 15)),
    ):
        with pytest.raises(Refusal, match=reason):
            tiles.frame_grid(7, video(1, 1, 1, 1, 1), torch.empty(shape, device="meta"))
    assert tiles.frame_grid(7, video(3, 1, 2, 1, 1)) == (7, 2, 3)
