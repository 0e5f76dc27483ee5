"""Errors about arguments: one line with the value and what was expected, before any work."""

import inspect

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, ConvWeight, Snapshot, checks, seeing
from fast_video_vae.kernels.backends import SIGNATURES
from fast_video_vae.tests.kernels.cases import OPS, inputs, video

META = torch.device("meta")


def v(*shape, dtype=torch.float32, device="cpu"):
    return video(*shape, dtype=dtype).to(device)


X = (2, 8, 3, 4, 6)
ONES = torch.ones(8)
WEIGHT = v(4, 8, 3, 3, 3)
TAPS = WEIGHT[:, :, 0]

WRONG = {
    "an integer x": (kernels.conv3d, (v(*X).int(), WEIGHT), {}, "x is int32; expected float32"),
    "stride in time of frames": (
        kernels.conv3d, (v(*X), TAPS), {"stride": (2, 1, 1)}, "stride in time and tail are for a",
    ),
    "a tail before frames": (
        kernels.conv3d, (v(*X), TAPS), {"tail": v(*X)}, "stride in time and tail are for a weight",
    ),
    "other channels": (
        kernels.conv3d, (v(*X), WEIGHT[:, 1:]), {}, r"weight is \[4, 7, 3, 3, 3\]; expected",
    ),
    "no outputs": (kernels.conv3d, (v(*X), WEIGHT[:0]), {}, "expected 5 numbers from 1 on"),
    "no rows": (
        kernels.conv3d, (v(*X)[..., :0, :], WEIGHT), {"padding": (1, 1)}, "more with its padding",
    ),
    "out without the tail": (
        kernels.rms_norm_silu, (v(*X), ONES), {"tail": v(*X), "out": v(*X)},
        r"out is .*; expected \[2, 8, 6, 4, 6\]",
    ),
    "no groups": (kernels.group_norm_silu, (v(*X), ONES, ONES, 0), {}, "groups: 0"),
    "narrow statistics": (
        kernels.group_norm_silu, (v(*X, dtype=torch.float16), ONES, ONES, 2),
        {"statistics": torch.ones(2, 3, 2, 2).half()}, "statistics is float16; expected float32",
    ),
    "no dimension": (kernels.silu_mul, (torch.tensor(1.0), ONES), {}, "x.ndim is 0"),
    "a negative border": (
        kernels.rms_norm_silu, (v(*X), ONES), {"border": -1}, "border is -1; expected 0 or more",
    ),
    "phases": (kernels.interleave_time, (v(*X), 3), {}, "phases: 3 does not divide 8"),
    "grid": (kernels.merge_phases, (v(2, 6, 1, 4, 4),), {}, "4 phases: 4 does not divide 6"),
    "flat grid": (kernels.merge_phases, (v(2, 8, 1, 0, 4),), {}, "expected 2 numbers from 1"),
    "source of other frames": (
        kernels.merge_phases, (v(*X), v(2, 8, 1, 3, 5), 2), {}, "times: 2 does not divide 3",
    ),
    "source of other channels": (
        kernels.merge_phases, (v(*X), v(2, 3, 3, 3, 5)), {}, "source: 3 does not divide 8",
    ),
    "times": (kernels.merge_phases, (v(*X), None, 0), {}, "times is 0"),
    "size 0": (kernels.pixel_shuffle_3d, (v(*X), (1, 0, 1)), {}, "expected 3 numbers from 1"),
    "order": (kernels.pixel_shuffle_3d, (v(*X), (1, 2, 2), "chw"), {}, "order is 'chw'"),
    "blocks": (kernels.average_down, (v(*X), 8), {"times": 1, "size": 4}, "size: 4 does not"),
    "averages": (kernels.average_down, (v(*X), 5), {"times": 2, "size": 2}, "channels: 5"),
    "patch": (kernels.frames_to_images, (v(*X),), {"patch": 3}, "size: 9 does not divide 8"),
    "images of integers": (
        kernels.frames_to_images, (v(*X),), {"dtype": torch.int16},
        "dtype is int16; expected .*, uint8, uint16",
    ),
    "sums and a bias": (
        kernels.int8_conv3d, (v(*X).char(), v(4, 8, 1, 1, 1).char(), None, torch.ones(4)),
        {"dtype": torch.int32}, "expected the sums alone",
    ),
    "sums in floats": (
        kernels.int8_conv3d, (v(*X).char(), v(4, 8, 1, 1, 1).char(), None), {},
        "dtype is float32; expected int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_unsuitable_argument_is_an_error_before_any_work(name):
    op, args, keywords, message = WRONG[name]
    if op is kernels.conv3d:  # no weight is derived
        kind = args[1].shape, args[1].dtype, args[1].device
        args = args[0], ConvWeight(*kind, lambda: pytest.fail("the weight was derived"))
    with pytest.raises(ValueError, match=message) as caught:
        op(*args, **keywords)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, BackendError)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_ops_accept_only_floats_of_all_dimensions(op, dtype):
    args, keywords = inputs(op, torch.float32)
    with pytest.raises(ValueError, match=f"{str(dtype)[6:]}; expected float32, bfloat16"):
        getattr(kernels, op)(args[0].to(dtype), *args[1:], **keywords)
    if op != "silu_mul":
        with pytest.raises(ValueError, match=r"; expected \[B, (C, T, H, W|N, d)\]"):
            getattr(kernels, op)(args[0][0], *args[1:], **keywords)


def given(op):
    """Return a call of an op by name, with all tensors that it can have."""
    if "conv3d" in op:
        residual, tail = video(1, 4, 2, 3, 4), video(1, 8, 1, 5, 6)
        call = {"x": video(1, 8, 3, 5, 6), "weight": video(4, 8, 3, 3, 3), "out": residual}
        names = ("bias", "residual_bias", "gamma" if op == "conv3d" else "scale")
        call |= dict.fromkeys(names, torch.ones(4)) | {"residual": residual}
        if op == "conv3d":
            return call | {"tail": tail}
        codes = {"x": torch.cat([tail, call["x"]], dim=2), "weight": call["weight"]}
        return call | {name: tensor.to(torch.int8) for name, tensor in codes.items()}
    args, keywords = inputs(op, torch.float32)
    signature = inspect.signature(getattr(kernels, op))
    call = signature.bind(*args, **keywords).arguments
    if op == "group_norm_silu":
        call["statistics"] = kernels.group_norm_statistics(args[0], args[3])
    if "out" in signature.parameters:
        call["out"] = getattr(kernels, op)(**call)
    return call


# Results can be on any device, in any dtype or in those of images; a kernel can have any width.
ALLOWED = {
    "device": ["pixel_shuffle_3d out", "frames_to_images out"],
    "dtype": ["pixel_shuffle_3d out"],
    "size": ["conv3d weight", "int8_conv3d weight"],
}

WRONG_TENSORS = {
    "device": (lambda x: x.to(META), "is on meta; expected cpu"),
    "dtype": (lambda x: x.to(torch.int32), "is int32; expected (float32|int8)"),
    "size": (lambda x: torch.cat([x, x], dim=-1), r"is \[.*\]; expected \["),
    "dimensions": (lambda x: torch.stack([x, x]), r"is \[.*\]; expected \["),
}


@pytest.mark.parametrize("op", SIGNATURES)
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_all_tensors_must_fit_the_first(op, wrong):
    call, (change, message) = given(op), WRONG_TENSORS[wrong]
    for name in [name for name, value in call.items() if torch.is_tensor(value)][1:]:
        if f"{op} {name}" not in ALLOWED.get(wrong, []):
            with pytest.raises(ValueError, match=f"^{name} {message}"):
                getattr(kernels, op)(**call | {name: change(call[name])})


def test_calls_within_a_stream_are_not_checked_again(monkeypatch):
    """Its layers give what fits; the tests set the switch for the other cases."""
    seen = Snapshot(0, 0, native=False)
    assert checks.wanted()
    with seeing(seen):
        assert checks.wanted()  # by the switch
        monkeypatch.setattr(checks, "_ALWAYS", False)
        with monkeypatch.context() as patch:
            patch.setattr(checks, "fit", lambda *_, **__: pytest.fail("the call is checked"))
            kernels.silu_mul(v(*X), v(*X))
    with pytest.raises(ValueError, match="gate"):
        kernels.silu_mul(v(*X), ONES)
