"""Norms that write their frames with a border of zeros, for a convolution that does not pad.

Results are written into memory of NaN inside a longer buffer, and any write outside of it is an
error.
"""

from itertools import pairwise, product, starmap

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, dispatch, use_backend
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.ready import sample_inputs, selfcheck, variants
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import Poisoned, each_dtype, random, some, video, window

OPS = ("rms_norm_silu", "group_norm_silu")

writing = pytest.mark.parametrize(
    "backend", ["reference", "triton", "cuda", "native"], indirect=True
)


def arguments(op, channels):
    """Return the arguments after `x`, and the options."""
    weight, bias = random(2, channels, seed=1)
    return ((weight,), {"bias": bias}) if op == "rms_norm_silu" else ((weight, bias, 4), {})


def surrounded(x, border):
    return F.pad(x, (border,) * 4)


@writing
@each_dtype
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("known", [None, 1, 2])
@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [
        (12, 3, 5),  # one tile holds several rows of pixels
        pytest.param(12, 1, 1, marks=pytest.mark.nightly),
        (160, 7, 9),  # several tiles, which begin within a row
        pytest.param(1024, 1, 17, marks=pytest.mark.nightly),
        pytest.param(1024, 5, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_border_of_zeros_surrounds_each_frame(backend, dtype, op, known, channels, height, width):
    """The tail has none: it is written inside the border of its frames, and updated."""
    args, options = arguments(op, channels)
    examples = product((1, 2, 3), ((1, 1), (2, 2), (1, 2)), (True, False))
    for frames, (border, batch), given in some(backend, examples, 4):
        x = video(batch, channels, frames, height, width, dtype=dtype)
        tails = Poisoned(batch, known or 0, height, width, channels, dtype=dtype)
        tail = None if known is None else tails.memory.movedim(-1, 1)
        before = video(batch, channels, known or 0, height, width, dtype=dtype, seed=2)
        if tail is not None:
            tail.copy_(before)
        shape = batch, channels, (known or 0) + frames, height + 2 * border, width + 2 * border
        buffer, out = window(*shape, dtype=dtype)
        keywords = {**options, "silu": given, "border": border}
        result = getattr(kernels, op)(x, *args, **keywords, tail=tail, out=out if given else None)
        assert result.movedim(1, -1)[0, 0].is_contiguous()
        result = buffer.take(out) if given else result
        value, error = getattr(formulas, op)(x, *args, **options, silu=given)
        joined = torch.cat([before.double(), value], dim=2)
        errors = torch.cat([torch.zeros_like(before.double()), error], dim=2)
        where = f"{tuple(x.shape)}, border {border}, known {known}"
        formulas.check(result, surrounded(joined, border), surrounded(errors, border), where)
        inner = result[..., border:-border, border:-border]
        assert not surrounded(torch.zeros_like(inner), border).count_nonzero()
        if tail is not None:
            assert torch.equal(inner[:, :, :known], before), where
            assert torch.equal(tails.take(tail), inner[:, :, frames:]), where


@writing
@pytest.mark.parametrize("op", OPS)
def test_the_frames_inside_a_border_are_those_without_it(backend, op):
    """Bit for bit, also the tails."""
    args, options = arguments(op, 96)
    x = video(2, 96, 3, 5, 6, dtype=torch.bfloat16)
    tails = [video(2, 96, 2, 5, 6, dtype=torch.bfloat16, seed=2) for _ in range(2)]
    plain = getattr(kernels, op)(x, *args, **options, tail=tails[0])
    actual = getattr(kernels, op)(x, *args, **options, tail=tails[1], border=1)
    assert torch.equal(actual, surrounded(plain, 1))
    assert torch.equal(*tails)


@writing
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("known", [None, 2])
def test_every_band_with_statistics_has_its_own_border(backend, dtype, known):
    weight, bias = random(2, 16, seed=1)
    x = video(2, 16, 3, 8, 4, dtype=dtype).mul_(3).add_(5)
    tail = None if known is None else video(2, 16, known, 8, 4, dtype=dtype, seed=2)
    mine = None if tail is None else tail.clone()
    statistics = kernels.group_norm_statistics(x, 2)
    whole = kernels.group_norm_silu(x, weight, bias, 2, tail=mine)
    for rows in starmap(slice, pairwise((0, 1, 4, 8))):
        band = None if tail is None else tail[..., rows, :]
        y = kernels.group_norm_silu(
            x[..., rows, :], weight, bias, 2, statistics=statistics, tail=band, border=1
        )
        assert torch.equal(y, surrounded(whole[..., rows, :], 1))
    assert tail is None or torch.equal(tail, mine)


@writing
@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan_do_not_reach_the_border(backend, op):
    args, options = arguments(op, 12)
    x = video(1, 12, 2, 3, 4)
    x[:, 3, 0, 0, 0], x[:, 5, 1, 2, 3] = torch.inf, torch.nan
    y = getattr(kernels, op)(x, *args, **options, border=1)
    inner = y[..., 1:-1, 1:-1]
    assert inner.isnan().any()
    assert torch.equal(y.nan_to_num(7.0), surrounded(inner.nan_to_num(7.0), 1))


@pytest.mark.parametrize("backend", ["native", "cuda"], indirect=True)
@pytest.mark.parametrize("op", OPS)
def test_frames_without_pixels_are_left_to_the_reference(backend, op):
    """All of their result is border."""
    args, options = arguments(op, 12)
    x = video(1, 12, 2, 0, 4)
    with pytest.raises(BackendError, match="the tensor is empty"):
        getattr(kernels, op)(x, *args, **options, border=1)
    with use_backend("reference"):
        assert not getattr(kernels, op)(x, *args, **options, border=1).count_nonzero()


@pytest.mark.parametrize("backend", ["triton", "cuda", "native"], indirect=True)
def test_a_border_in_the_memory_of_the_input_is_refused(backend):
    """A frame of one row has the strides of a bordered one."""
    buffer, gamma = video(1, 12, 3, 3, 4), random(12)
    x = buffer[:, :, :1, :1, :2]
    with pytest.raises(BackendError, match="out overlaps the memory of x"):
        kernels.rms_norm_silu(x, gamma, out=buffer[:, :, :1], border=1)


@pytest.mark.parametrize("op", OPS)
def test_an_unsuitable_border_is_an_error(op):
    args, options = arguments(op, 12)
    x = video(1, 12, 2, 3, 4)
    for border, out, message in (
        (-1, None, "border is -1; expected 0 or more"),
        (1, x, r"out is \[1, 12, 2, 3, 4\]; expected \[1, 12, 2, 5, 6\]"),
        (0, video(1, 12, 2, 5, 6), r"out is \[1, 12, 2, 5, 6\]; expected \[1, 12, 2, 3, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(kernels, op)(x, *args, **options, out=out, border=border)


@pytest.mark.parametrize(("border", "served"), [(0, ("triton",)), (1, ()), (2, ())])
def test_calls_with_a_border_have_a_check_of_their_own(border, served):
    """A backend that forgets a part of the border serves only calls without one."""
    x, gamma, codes = video(1, 16, 2, 4, 4), random(16), random(16).abs()
    counts = torch.zeros(2, dtype=torch.int64)

    def ask(name, op, *args, **options):
        y = dispatch.ask("reference", op, *args, **options)
        if name == "triton" and options.get("border"):
            y[..., -1, -1] = 1
        if name == "cuda":
            raise Refusal("no")
        return y

    for more in ({}, {"codes": codes, "saturated": counts}):
        options = {"silu": True, "border": border, **more}
        samples = variants.samples_of("rms_norm_silu", (x, gamma), options, x.device)
        assert selfcheck.checked(ask, "rms_norm_silu", samples) == served


def test_a_sample_call_with_a_border_writes_into_memory_of_nan():
    x, gamma = sample_inputs.video(24), sample_inputs.row(24)
    given = {"x": x, "gamma": gamma, "border": 1, "tail": sample_inputs.video(24, 2)}
    made = sample_inputs.call("rms_norm_silu", (3, 4, 5), torch.float16, torch.device("cpu"), given)
    assert made["out"].shape == (1, 24, 5, 6, 7)
    assert made["out"].isnan().all()
    counted = sample_inputs.moved_bytes(made, made["out"])
    values = 24 * (3 * 20 + 2 * 2 * 20 + 5 * 42)
    assert counted == 2 * values + made["gamma"].nbytes
