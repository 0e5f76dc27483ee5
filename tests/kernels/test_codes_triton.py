"""The codes of the norms by Triton, in its interpreter, against rounded formulas in float64.

A code may differ by 1 from the formula only where the value is so close to the half between two
codes that the rounding errors of float32 reach it.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import Poisoned, each_dtype, random, some, video

OPS = ("rms_norm_silu", "group_norm_silu")
ZERO = {torch.uint8: 17, torch.int8: -111}

by_triton = pytest.mark.parametrize("backend", ["triton"], indirect=True)


def arguments(op, channels):
    """Return the arguments after `x`, and the options."""
    weight, bias = random(2, channels, seed=1)
    groups = next(count for count in (4, 3, 1) if channels % count == 0)
    return ((weight,), {"bias": bias}) if op == "rms_norm_silu" else ((weight, bias, groups), {})


def some_codes(channels):
    """Return codes per unit, `[C]`: about a tenth of the values is below or above all codes."""
    return 60 + 140 * random(channels, seed=3).sigmoid()


def interval(value, error, codes):
    """Return the least and the greatest of the whole numbers that a value may be rounded to."""
    factors = codes.double().view(-1, 1, 1, 1)
    scaled = value * factors
    # A number next to an infinite one is 0 exactly, but the bound of its error is NaN.
    error = (error * factors.abs() + 2.0**-24 * scaled.abs() + 1e-30).nan_to_num(0)
    assert error.max() < 0.5
    return (scaled - error).round(), (scaled + error).round()


def check(result, saturated, low, high):
    """Compare a result without border and tail, and its counts, with an interval of `[...]`."""
    zero = ZERO[result.dtype]
    first, last, lost = zero - 17, zero + 238, low.isnan()
    ends = [(each + zero).clamp(first, last).masked_fill(lost, zero) for each in (low, high)]
    assert ((result >= ends[0]) & (result <= ends[1])).all()
    surely, perhaps = (
        ((each < -17) | (other > 238)).sum()
        for each, other in ((high, low), (low, high))
    )  # fmt: skip
    assert surely <= saturated[0] <= perhaps
    # Among many values, some are too close to the last half for an exact count.
    assert perhaps - surely <= low.numel() // 4096
    assert saturated[1] == lost.sum()


class Video:
    """Memory of codes `[B, C, T, H, W]` inside a longer buffer that nothing may write."""

    def __init__(self, batch, channels, frames, height, width, *, dtype):
        shape = batch, frames, height, width, channels
        self._bytes = Poisoned(*shape, dtype=torch.uint8)
        self.codes = self._bytes.memory.view(dtype).movedim(-1, 1)

    def take(self):
        """Return a copy; fail if anything around the memory was written."""
        copy = self.codes.clone()
        self._bytes.take(self.codes.view(torch.uint8))
        return copy


def run(op, x, *, known=None, border=0, result=torch.int8, silu=True):
    """Run an op with codes, and compare it with its formula."""
    batch, channels, frames, height, width = x.shape
    args, options = arguments(op, channels)
    codes, counts = some_codes(channels), torch.tensor([1000, 2000])
    size = (known or 0) + frames, height + 2 * border, width + 2 * border
    out = Video(batch, channels, *size, dtype=result)
    tail = Video(batch, channels, known or 0, height, width, dtype=result)
    before = torch.arange(tail.codes.numel()).mul(7).to(result).view(tail.codes.shape)
    tail.codes.copy_(before)
    written = getattr(kernels, op)(
        x, *args, **options, silu=silu, tail=None if known is None else tail.codes, out=out.codes,
        border=border, codes=codes, saturated=counts,
    )  # fmt: skip
    assert written is out.codes
    y = out.take()
    inner = y[..., border : border + height, border : border + width]
    assert torch.equal(y, F.pad(inner, (border,) * 4, value=ZERO[result]))
    new = inner[:, :, known or 0 :]
    assert torch.equal(inner[:, :, : known or 0], before)
    if known:
        assert torch.equal(tail.take(), inner[:, :, frames:])
    value, error = getattr(formulas, op)(x, *args, **options, silu=silu)
    check(new, counts - torch.tensor([1000, 2000]), *interval(value, error, codes))
    return new, counts


@by_triton
@each_dtype
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("channels", [3, 20, 96])
def test_codes_are_those_of_the_formula(backend, dtype, op, channels):
    for known, border in ((None, 0), (2, 1)):
        x = video(2, channels, 2, 3, 5, dtype=dtype)
        new, counts = run(op, x, known=known, border=border)
        assert counts[0] > 1000
        ends = {-128, 127} if channels > 3 else {-128}
        assert ends <= set(new.unique().tolist())


@by_triton
@each_dtype
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("known", [None, 0, 1, 2])
@pytest.mark.parametrize("border", [0, 1])
def test_tails_and_borders_are_codes(backend, dtype, op, known, border):
    for frames, result in ((1, torch.int8), (3, torch.uint8)):
        x = video(1, 20, frames, 3, 4, dtype=dtype)
        run(op, x, known=known, border=border, result=result)


@pytest.mark.slow
@by_triton
@each_dtype
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("channels", [3, 20, 96, 160])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 9), (1, 67), (13, 1)])
def test_codes_of_all_shapes_are_those_of_the_formula(backend, dtype, op, channels, height, width):
    """Several tiles, which begin within a row, or one pixel."""
    examples = product((None, 1, 2), (0, 1, 2), (True, False), (1, 3))
    for known, border, silu, frames in some(backend, examples, 3):
        x = video(2, channels, frames, height, width, dtype=dtype)
        result = torch.uint8 if frames == 1 else torch.int8
        run(op, x, known=known, border=border, result=result, silu=silu)


@by_triton
@pytest.mark.parametrize("op", OPS)
def test_a_new_result_has_the_dtype_of_its_device(backend, op):
    x = video(1, 12, 2, 3, 4)
    args, options = arguments(op, 12)
    counts = torch.zeros(2, dtype=torch.int64)
    y = getattr(kernels, op)(x, *args, **options, codes=some_codes(12), saturated=counts)
    assert y.dtype == kernels.code_dtype(x.device)
    value, error = getattr(formulas, op)(x, *args, **options)
    check(y, counts, *interval(value, error, some_codes(12)))


@by_triton
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("known", [None, 1])
def test_nan_and_infinities_are_counted_in_new_frames_alone(backend, op, known):
    """A NaN or infinity makes a pixel, or a frame and group, NaN: those have the code of 0."""
    x = video(1, 12, 3, 3, 5)
    x[:, 3, 0, 0, 1], x[:, 5, 1, 2, 4] = torch.nan, torch.inf
    _, counts = run(op, x, known=known, border=1)
    least = 12 + 1 if op == "rms_norm_silu" else 2 * 3 * 15
    assert counts[1] >= 2000 + least


@by_triton
def test_infinite_values_have_the_last_code_and_no_row_counts_twice(backend):
    """Rows of 20 channels are in tiles of 32: the lanes behind them do not count."""
    x, gamma = video(1, 20, 1, 1, 3), torch.full((20,), 3e38)
    counts = torch.zeros(2, dtype=torch.int64)
    y = kernels.rms_norm_silu(x, gamma, silu=False, codes=torch.full((20,), 1e3), saturated=counts)
    zero = ZERO[y.dtype]
    assert torch.equal(y, torch.where(x > 0, zero + 238, zero - 17).to(y.dtype))
    assert counts.tolist() == [60, 0]


@by_triton
def test_no_channel_or_pixel_beyond_a_frame_counts(backend):
    """A tile with NaN in all rows, a bias that saturates, and rows and lanes behind the frame."""
    x = torch.full((1, 1, 1, 3, 20), torch.nan).movedim(-1, 1)
    options = {"codes": torch.ones(20), "saturated": torch.zeros(2, dtype=torch.int64)}
    y = kernels.rms_norm_silu(x, torch.ones(20), bias=torch.full((20,), 1e6), border=1, **options)
    assert (y == ZERO[y.dtype]).all()
    assert options["saturated"].tolist() == [0, 60]
    options["saturated"].zero_()
    zeros = video(1, 20, 1, 1, 3).zero_()
    kernels.group_norm_silu(zeros, torch.ones(20), torch.full((20,), 1e6), 4, **options)
    assert options["saturated"].tolist() == [60, 0]


@by_triton
@pytest.mark.parametrize("result", [torch.int8, torch.uint8])
def test_halves_are_rounded_to_even(backend, result):
    """A row of equal powers of 2 has a norm without rounding errors: values are the scales."""
    halves = torch.tensor([-18.5, -17.5, -16.5, -1.5, -0.5, 0.5, 1.5, 2.5, 237.5, 238.5, 239.5])
    halves = torch.cat([halves, torch.tensor([-17.0, 0.0, 238.0, 239.0, 1e30])])
    rounded = torch.tensor([-18, -18, -16, -2, 0, 0, 2, 2, 238, 238, 240, -17, 0, 238, 239, 1e30])
    x = torch.full((1, 1, 1, 3, 16), 2.0).movedim(-1, 1)
    out = torch.empty_like(x, dtype=result)
    counts = torch.zeros(2, dtype=torch.int64)
    kernels.rms_norm_silu(
        x, halves.sign(), silu=False, out=out, codes=halves.abs(), saturated=counts
    )
    expected = (rounded.clamp(-17, 238) + ZERO[result]).to(result).view(-1, 1, 1, 1)
    assert torch.equal(out, expected.expand_as(out))
    assert counts.tolist() == [3 * 5, 0]


@by_triton
def test_bands_with_statistics_have_the_codes_and_counts_of_the_whole(backend):
    x = video(1, 12, 2, 5, 4)
    args, _ = arguments("group_norm_silu", 12)
    counts = torch.zeros(2, 2, dtype=torch.int64)
    codes, statistics = some_codes(12), kernels.group_norm_statistics(x, args[-1])
    whole = kernels.group_norm_silu(x, *args, codes=codes, saturated=counts[0])
    given = {"statistics": statistics, "codes": codes, "saturated": counts[1]}
    bands = [kernels.group_norm_silu(x[..., rows, :], *args, **given)
             for rows in (slice(0, 2), slice(2, 5))]  # fmt: skip
    assert torch.equal(torch.cat(bands, dim=3), whole)
    assert torch.equal(*counts)


@by_triton
def test_codes_in_the_memory_of_the_input_are_refused(backend):
    """Both begin at one address and have the same strides, in bytes and in numbers."""
    x = video(1, 12, 1, 3, 4, dtype=torch.bfloat16)
    out = x.movedim(1, -1).flatten().view(torch.int8)[: x.numel()]
    out = out.view(1, 1, 3, 4, 12).movedim(-1, 1)
    given = {"codes": torch.ones(12), "saturated": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(BackendError, match="out overlaps the memory of x"):
        kernels.rms_norm_silu(x, torch.ones(12), out=out, **given)
