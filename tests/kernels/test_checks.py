"""Errors about arguments: one line with the value and what was expected, before any work."""

import inspect

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.tests.kernels.cases import OPS, inputs, missing, video

META = torch.device("meta")


def v(*shape, dtype=torch.float32, device="cpu"):
    return video(*shape, dtype=dtype).to(device)


X = (2, 8, 3, 4, 6)
ONES = torch.ones(8)

WRONG = {
    "no video": (kernels.rms_norm_silu, (torch.ones(2, 8, 4, 4), ONES), {}, r"x is \[2, 8, 4, 4\]"),
    "few scales": (kernels.rms_norm_silu, (v(*X), ONES[1:]), {}, "gamma has 7 numbers; expected 8"),
    "integer scales": (kernels.rms_norm_silu, (v(*X), ONES.long()), {}, "gamma is int64; expected"),
    "tail of another size": (
        kernels.rms_norm_silu, (v(*X), ONES), {"tail": v(2, 8, 1, 4, 5)},
        r"tail is \[2, 8, 1, 4, 5\]; expected \[2, 8, 1, 4, 6\]",
    ),
    "tail of another dtype": (
        kernels.rms_norm_silu, (v(*X), ONES), {"tail": v(*X, dtype=torch.bfloat16)},
        "tail is bfloat16; expected float32",
    ),
    "tail of four dimensions": (
        kernels.rms_norm_silu, (v(*X), ONES), {"tail": v(*X)[0]}, r"expected \[B, C, T, H, W\]",
    ),
    "out without the tail": (
        kernels.rms_norm_silu, (v(*X), ONES), {"tail": v(*X), "out": v(*X)},
        r"out is .*; expected \[2, 8, 6, 4, 6\]",
    ),
    "groups": (kernels.group_norm_silu, (v(*X), ONES, ONES, 3), {}, "groups: 3 does not divide 8"),
    "no groups": (kernels.group_norm_silu, (v(*X), ONES, ONES, 0), {}, "groups: 0"),
    "groups of statistics": (
        kernels.group_norm_statistics, (v(*X), 3), {}, "groups: 3 does not divide 8",
    ),
    "statistics of no video": (kernels.group_norm_statistics, (v(*X)[0], 2), {}, r"x is \[8, 3, 4"),
    "statistics of other groups": (
        kernels.group_norm_silu, (v(*X), ONES, ONES, 2), {"statistics": torch.ones(2, 3, 2, 4)},
        r"statistics is \[2, 3, 2, 4\]; expected \[2, 3, 2, 2\]",
    ),
    "narrow statistics": (
        kernels.group_norm_silu, (v(*X, dtype=torch.float16), ONES, ONES, 2),
        {"statistics": torch.ones(2, 3, 2, 2).half()}, "statistics is float16; expected float32",
    ),
    "narrow statistics of float64": (
        kernels.group_norm_silu, (v(*X, dtype=torch.float64), ONES, ONES, 2),
        {"statistics": torch.ones(2, 3, 2, 2)}, "statistics is float32; expected float64",
    ),
    "statistics elsewhere": (
        kernels.group_norm_silu, (v(*X), ONES, ONES, 2),
        {"statistics": torch.ones(2, 3, 2, 2, device=META)}, "statistics is on meta; expected cpu",
    ),
    "no dimension": (kernels.silu_mul, (torch.tensor(1.0), ONES), {}, "x has 0 dimensions"),
    "gate": (
        kernels.silu_mul, (torch.ones(3, 8), ONES), {}, r"gate is \[8\]; expected \[3, 8\]",
    ),
    "residual": (
        kernels.bias_residual, (v(*X), ONES, v(1, *X[1:])), {}, r"residual is \[1, 8, 3, 4, 6\]",
    ),
    "keys": (kernels.attention, (torch.ones(1, 5, 8), *[torch.ones(1, 5, 4)] * 2), {}, "k is"),
    "values": (
        kernels.attention, [torch.ones(1, count, 8) for count in (5, 5, 4)], {},
        r"v is \[1, 4, 8\]; expected \[1, 5, 8\]",
    ),
    "a negative border": (
        kernels.rms_norm_silu, (v(*X), ONES), {"border": -1}, "border is -1; expected 0 or more",
    ),
    "out without the border": (
        kernels.group_norm_silu, (v(*X), ONES, ONES, 2), {"border": 1, "out": v(*X)},
        r"out is .*; expected \[2, 8, 3, 6, 8\]",
    ),
    "out with a border": (
        kernels.rms_norm_silu, (v(*X), ONES), {"out": v(2, 8, 3, 6, 8)},
        r"out is .*; expected \[2, 8, 3, 4, 6\]",
    ),
    "phases": (kernels.interleave_time, (v(*X), 3), {}, "phases: 3 does not divide 8"),
    "phases out": (
        kernels.interleave_time, (v(*X), 2), {"out": v(*X)}, r"expected \[2, 4, 6, 4, 6\]",
    ),
    "grid": (kernels.merge_phases, (v(2, 6, 1, 4, 4),), {}, "4 phases: 4 does not divide 6"),
    "flat grid": (kernels.merge_phases, (v(2, 8, 1, 0, 4),), {}, "one row and column at least"),
    "source": (
        kernels.merge_phases, (v(*X), v(*X)), {}, r"source is .*; expected \[2, 8, 3, 3, 5\]",
    ),
    "source of other frames": (
        kernels.merge_phases, (v(*X), v(2, 8, 1, 3, 5), 2), {}, "grid has 3 frames",
    ),
    "source of other channels": (
        kernels.merge_phases, (v(*X), v(2, 3, 3, 3, 5)), {}, "source: 3 does not divide 8",
    ),
    "bias of all phases": (
        kernels.merge_phases, (v(*X),), {"bias": ONES}, "bias has 8 numbers; expected 2",
    ),
    "times": (kernels.merge_phases, (v(*X), None, 0), {}, "times is 0"),
    "size": (kernels.pixel_shuffle_3d, (v(*X), (1, 3, 1)), {}, "size: 3 does not divide 8"),
    "size 0": (kernels.pixel_shuffle_3d, (v(*X), (1, 0, 1)), {}, "expected 1 or more"),
    "order": (kernels.pixel_shuffle_3d, (v(*X), (1, 2, 2), "chw"), {}, "order is 'chw'"),
    "shuffled out": (
        kernels.pixel_shuffle_3d, (v(*X), (1, 2, 2)), {"out": v(*X)},
        r"expected \[2, 2, 3, 8, 12\]",
    ),
    "blocks": (kernels.average_down, (v(*X), 8), {"times": 1, "size": 4}, "multiples of 4"),
    "averages": (kernels.average_down, (v(*X), 5), {"times": 2, "size": 2}, "channels: 5"),
    "patch": (kernels.frames_to_images, (v(*X),), {"patch": 3}, "size: 9 does not divide 8"),
    "images of integers": (
        kernels.frames_to_images, (v(*X),), {"dtype": torch.int16},
        "images are int16; expected a float dtype, uint8 or uint16",
    ),
    "images out": (
        kernels.frames_to_images, (v(*X),), {"out": torch.ones(3, 4, 6, 8)},
        r"expected \[6, 4, 6, 8\] or \[2, 3, 4, 6, 8\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_unsuitable_argument_is_an_error(name):
    op, args, keywords, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        op(*args, **keywords)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, BackendError)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_ops_accept_only_floats(op, dtype):
    args, keywords = inputs(op, torch.float32)
    with pytest.raises(ValueError, match=f"{str(dtype)[6:]}; expected float32, bfloat16"):
        getattr(kernels, op)(args[0].to(dtype), *args[1:], **keywords)


def given(op):
    args, keywords = inputs(op, torch.float32)
    return inspect.signature(getattr(kernels, op)).bind(*args, **keywords).arguments


OTHERS = [
    (op, name)
    for op in OPS
    for name in [name for name, value in given(op).items() if torch.is_tensor(value)][1:]
]


@pytest.mark.parametrize(("op", "name"), OTHERS)
def test_all_tensors_must_be_on_one_device(op, name):
    arguments = given(op)
    moved = {name: arguments[name].to(META)}
    with pytest.raises(ValueError, match=f"{name} is on meta; expected cpu"):
        getattr(kernels, op)(**arguments | moved)


def test_attention_needs_three_dimensions():
    with pytest.raises(ValueError, match=r"\[5, 8\]; expected \[B, N, d\]"):
        kernels.attention(*torch.ones(3, 5, 8))


@pytest.mark.parametrize("op", OPS)
def test_ops_run_on_the_meta_device(op):
    """Networks are built on it before their weights are loaded."""
    args, keywords = inputs(op, torch.bfloat16)
    shape = getattr(kernels, op)(*args, **keywords).shape

    def moved(value):
        return value.to(META) if isinstance(value, torch.Tensor) else value

    meta = {name: moved(value) for name, value in keywords.items()}
    assert getattr(kernels, op)(*map(moved, args), **meta).shape == shape


@pytest.mark.parametrize("name", ["native", "reference"])
def test_a_band_with_statistics_runs_on_the_meta_device(name):
    if missing(name):
        pytest.skip(missing(name))
    x, ones = v(1, 16, 2, 8, 5, device=META), torch.ones(16, device=META)
    with use_backend(name):
        statistics = kernels.group_norm_statistics(x, 4)
        band = kernels.group_norm_silu(x[..., 2:5, :], ones, ones, 4, statistics=statistics)
    assert (statistics.shape, statistics.device) == ((1, 2, 2, 4), META)
    assert band.shape == (1, 16, 2, 3, 5)
