"""The convolution for Hopper: its source in the emulator, its refusals."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.kernels import BackendError, ConvWeight, Route, conv3d, errors, use_backend
from fast_video_vae.kernels.backends import Kernel
from fast_video_vae.kernels.convolution.fused import Fused, of_ours
from fast_video_vae.kernels.cuda_ops import hopper
from fast_video_vae.kernels.cuda_ops.hopper_tile import tile_of
from fast_video_vae.kernels.routes import Candidate
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import missing, place, random, video
from fast_video_vae.tests.kernels.convolutions import build, taps_of

# Of the driver; the emulator replaces it.
real_map = hopper.tensor_map.__wrapped__

CUBE, FLAT, ONE = (3, 3, 3), (1, 3, 3), (1, 1, 1)
ALL = ("bias", "residual", "residual_bias")
NORM = (*ALL, "gamma")
FP16, BF16 = torch.float16, torch.bfloat16
APART, OVER, NEW = "a slice of frames", "the residual", "new memory"

# Variant; channels, taps, padding, frames of tail and x, size, terms, dtype; target.
CALLS = [
    (0, ((96, 96), CUBE, (1, 1), (2, 1), (17, 5), NORM, BF16), APART),
    (1, ((160, 160), CUBE, (1, 1), (1, 2), (16, 1), NORM, BF16), OVER),  # an odd slab
    (0, ((32, 384), FLAT, (1, 0), (0, 2), (1, 17), ALL, BF16), NEW),  # two tiles of channels
    pytest.param(1, ((64, 512), (2, 2), (1, 1), (0, 3), (16, 7), ("bias",), FP16), APART,
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture
def on_hopper():
    """Run on a GPU of sm_90, or the source on the CPU."""
    if reason := missing("cuda"):
        pytest.skip(reason)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90, or none")
    with place("cuda"):
        yield


@pytest.mark.parametrize(("variant", "call", "target"), CALLS)
@pytest.mark.usefixtures("on_hopper")
def test_calls_equal_the_formula_between_nan(variant, call, target, monkeypatch):
    """In a batch of two, by three blocks that have several tiles."""
    monkeypatch.setattr(
        hopper, "tile_of", lambda *args, norm, **_: tile_of(*args, copies=not variant, norm=norm)
    )
    channels, taps, padding, lengths, size, terms, dtype = call
    built = build(
        channels, taps, ONE, padding, lengths, size, terms, dtype, batch=2, target=target,
        pick=lambda choices: 1 if 0 in choices else 64,
        shaped=lambda values: values.repeat_interleave(2)[::2] if variant else values.to(dtype),
    )  # fmt: skip
    with use_backend("hopper"):
        built.check(built.run())


@pytest.mark.usefixtures("on_hopper")
def test_special_values_stay_in_their_pixels():
    x, weight = video(1, 32, 1, 4, 20).to(BF16), taps_of(96, 32, 1, 1, 1).to(BF16)
    x[..., 2, 3], residual = 0.0, torch.zeros(1, 1, 4, 20, 96, dtype=BF16).movedim(-1, 1)
    residual[:, 5, :, 1, 17] = float("nan")
    with use_backend("hopper"):
        y = conv3d(x, weight, residual=residual, gamma=torch.ones(96), tail=x[:, :, :0])
    assert y[..., 1, 17].isnan().all()
    assert y.isnan().sum() == 96
    assert not y[..., 2, 3].any()


def refused(reason, args, keywords):
    with use_backend("hopper"), pytest.raises(BackendError, match=re.escape(reason)):
        conv3d(*args, **keywords)


@pytest.mark.usefixtures("on_hopper")
def test_calls_that_the_kernel_cannot_run_are_refused():
    x, weight = video(1, 32, 2, 4, 4).to(BF16), taps_of(96, 32, 1, 1, 1).to(BF16)
    odd = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(1, 2, 4, 4, 32).movedim(-1, 1)
    frames, square = video(1, 96, 5, 4, 4).to(BF16), taps_of(96, 96, 1, 1, 1).to(BF16)
    three, after, before = frames[:, :, :3], frames[:, :, 3:], frames.clone()
    apart = torch.empty_strided((1, 96, 3, 4, 4), (0, 1, 1540, 384, 96), dtype=BF16)
    many = torch.empty(1, 1, 1, 1_316_000, 32, dtype=BF16).movedim(-1, 1)
    high, aligned = taps_of(96, 32, 1, 4, 1).to(BF16), "memory at multiples of 16 bytes"
    for reason, *args, keywords in (
        ("the tensor is empty", x[:, :, :0], weight, {"tail": x}),
        ("more items than 31 bits count", many, weight, {}),
        ("no kernel for float32", x.float(), weight.float(), {}),
        ("stride 1, not 0 at [1, 2, 2]", x, weight, {"stride": (1, 2, 2)}),
        ("multiples of 192, 160, 128, 96, not 32 to 48", x, weight[:48], {}),
        ("1 x 4 x 1; expected 3 taps at most", x, high, {"padding": (2, 0)}),
        ("out overlaps the memory of x", three, square, {"out": frames[:, :, 2:]}),
        ("overlaps the memory of tail", after, square, {"tail": frames[:, :, :1], "out": three}),
        ("x is not channels-last", x.contiguous(), weight, {}),
        (aligned, odd, weight, {}),
        (aligned, x, weight, random(97)[1:], {}),
        (aligned, x[:, :, :1].expand(-1, -1, 2, -1, -1), weight, {}),
        (aligned, three, square, {"residual": apart}),
    ):  # fmt: skip
        refused(reason, args, keywords)
    assert torch.equal(frames, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a GPU")
@pytest.mark.parametrize(("kind", "capability"), [("nvidia", (10, 0)), ("amd", (9, 0))])
def test_other_devices_are_refused(kind, capability, monkeypatch):
    x, weight = video(1, 32, 2, 4, 4).to(BF16), taps_of(96, 32, 1, 1, 1).to(BF16)
    monkeypatch.setattr(hopper, "device_kind", lambda _: kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    refused("hopper: it needs an NVIDIA GPU of compute capability 9.0", (x, weight), {})


@pytest.mark.usefixtures("on_hopper")
def test_a_driver_that_refuses_leaves_the_call_to_the_library_in_one_line(monkeypatch, caplog):
    def refuses(_):
        raise RuntimeError("the driver returned 1 (an error)")

    monkeypatch.setattr(hopper, "tensor_map", real_map)
    monkeypatch.setattr(hopper, "driver", lambda: SimpleNamespace(tensor_map=refuses))
    monkeypatch.setattr(errors, "_logged", set())
    x, weight = video(1, 32, 2, 4, 4).to(BF16), ConvWeight.of(taps_of(96, 32, 1, 1, 1).to(BF16))
    own = Candidate(Kernel("hopper", 1), of_ours(96))
    route = Route(ONE, (own, Candidate(Kernel("reference", 0), Fused())), joined=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            formulas.check(conv3d(x, weight, route=route), *formulas.conv3d(x, weight.plain()))
    (line,) = caplog.messages
    assert line.startswith("Fast Video VAE: hopper: the driver refuses it (the driver returned 1")
    assert line.endswith("), so other convolutions run; try another driver")
