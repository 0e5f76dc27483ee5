"""Zeros, infinities, NaN and numbers near the limits of a dtype give the result of the formula."""

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import each_dtype, has, random, serving, video

INF, NAN = float("inf"), float("nan")


@each_dtype
def test_a_row_of_zeros_stays_zero(backend, dtype):
    """Also one that a bias cancels."""
    channels = 33
    x = video(1, channels, 1, 4, 5, dtype=dtype)
    x[..., 2, 3] = 0
    scales = torch.ones(channels)
    for silu in (True, False):
        y = formulas.holds("rms_norm_silu", x, scales, silu=silu)
        assert not y[..., 2, 3].any()
    x = torch.full((1, 1, 1, 3, channels), 0.75, dtype=dtype).movedim(-1, 1)
    assert not kernels.rms_norm_silu(x, scales, bias=-0.75 * scales).any()


@each_dtype
def test_numbers_whose_squares_leave_the_dtype_are_normalised(backend, dtype):
    """Their squares are in the range of float32: 96 of 1e36, and 1e-30."""
    channels = 96
    x, gamma = video(2, channels, 1, 3, 5), random(channels, seed=1)
    large = (x * (1e4 if dtype == torch.float16 else 1e18)).to(dtype)
    formulas.holds("rms_norm_silu", large, gamma)
    if dtype == torch.float16:
        formulas.holds("group_norm_silu", large, gamma, torch.zeros(channels), 1)
        formulas.holds("group_norm_statistics", large, 1)
        return
    small = (x * 1e-15).to(dtype)
    # The norm comes near 1e-12, the smallest divisor; squares lose digits below 1e-38.
    expected, _ = formulas.rms_norm_silu(small, gamma)
    assert torch.allclose(kernels.rms_norm_silu(small, gamma).double(), expected, rtol=1e-2)


def test_norms_of_the_largest_bfloat16_are_not_nan(backend):
    """The squares overflow float32: division by an infinite norm gives zeros."""
    x = torch.full((1, 1, 2, 3, 16), 3e38, dtype=torch.bfloat16).movedim(-1, 1)
    x[:, 1::2] *= -1
    assert not kernels.rms_norm_silu(x, torch.ones(16), silu=False).any()


@each_dtype
def test_silu_far_below_zero_is_zero(backend, dtype):
    """`exp` overflows there; the norms reach these numbers through their scale."""
    lowest = torch.finfo(dtype).min
    x = torch.tensor([-80.0, -88.0, -89.0, -104.0, -1e3, -6e4, lowest] * 5).to(dtype)
    for gate in (1.0, -2.0):
        y = kernels.silu_mul(x, torch.full_like(x, gate))
        assert not y.isnan().any()
        assert (y.abs() <= 1e-30).all()
    rows = video(1, 16, 1, 3, 5, dtype=dtype)
    for y in (
        kernels.rms_norm_silu(rows, torch.full((16,), 1e6)),
        kernels.group_norm_silu(rows, torch.full((16,), 1e6), torch.zeros(16), 2),
    ):
        assert not y.isnan().any()
        assert (y.abs()[rows < -0.1] <= 1e-30).sum() > 10


@each_dtype
def test_infinities_and_nan_stay_in_their_pixel(backend, dtype):
    channels = 16
    x = video(1, channels, 1, 2, 4, dtype=dtype)
    x[0, 1, 0, 0, 1] = INF
    x[0, -1, 0, 1, 2] = NAN
    x[0, 0, 0, 1, 3] = -INF
    gamma = random(channels, seed=1)
    for silu in (True, False):
        formulas.holds("rms_norm_silu", x, gamma, silu=silu)


@pytest.mark.parametrize("number", [INF, NAN])
@each_dtype
def test_infinities_and_nan_stay_in_their_group(backend, dtype, number):
    """Of the numbers, or of the statistics: rounding must not carry their NaN over to zero."""
    x = video(2, 12, 2, 3, 5, dtype=dtype)
    weight, bias = random(2, 12, seed=1)
    x[1, 4:8, 0] = 0
    expected = kernels.group_norm_silu(x, weight, bias, 3)
    statistics = kernels.group_norm_statistics(x, 3)
    x[1, 5, 0, 2, 4] = number
    y = kernels.group_norm_silu(x, weight, bias, 3)
    assert y[1, 4:8, 0].isnan().all()
    y[1, 4:8, 0] = expected[1, 4:8, 0]
    assert torch.equal(y, expected)

    x[1, 4:8, 0] = number
    broken = kernels.group_norm_statistics(x, 3)
    assert broken[1, 0, 1, 1].isnan()
    assert not broken[1, 0, 0, 1].isfinite()
    broken[1, 0, :, 1] = statistics[1, 0, :, 1]
    assert torch.equal(broken, statistics)

    x[1, 4:8, 0] = 0
    expected = kernels.group_norm_silu(x, weight, bias, 3, statistics=statistics)
    nan = torch.full((), -1, dtype=torch.int32).view(torch.float32)  # all of its bits are set
    for place in (0, 1):
        given = statistics.clone()
        given[0, 1, place, 1] = nan
        y = kernels.group_norm_silu(x, weight, bias, 3, statistics=given)
        assert y[0, 4:8, 1].isnan().all()
        y[0, 4:8, 1] = expected[0, 4:8, 1]
        assert torch.equal(y, expected)


@each_dtype
def test_infinities_and_nan_in_elementwise_ops(backend, dtype):
    """`-inf * sigmoid(-inf)` is `-inf * 0`: NaN, as in the formula."""
    greatest = torch.finfo(dtype).max
    numbers = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, greatest, -greatest]).to(dtype)
    x, y = (part.flatten() for part in torch.meshgrid(numbers, numbers, indexing="ij"))
    formulas.holds("silu_mul", x, y)

    if not has(backend, "bias_residual"):
        return
    x, y = (part.view(1, 1, 9, 1, 9).movedim(-1, 1) for part in (x, y))
    bias = torch.tensor([0.0, 1.0, -1.0, INF, 0.0, NAN, 0.0, 0.5, -0.5])
    formulas.holds("bias_residual", x, bias, y)
    formulas.holds("bias_residual", x, None, y, bias)
    if has(backend, "merge_phases"):
        grid = torch.full((1, 1, 2, 2, 4), greatest, dtype=dtype).movedim(-1, 1)
        assert (kernels.merge_phases(grid, grid[:, :1, :, :1, :1]) == INF).all()


@pytest.mark.parametrize(
    "backend", serving("pixel_shuffle_3d", "interleave_time", "merge_phases"), indirect=True
)
@each_dtype
def test_moved_numbers_keep_their_bits(backend, dtype):
    """The inputs are infinities, NaN, negative zeros and subnormals."""
    as_bits = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.randint(
        torch.iinfo(as_bits).min, torch.iinfo(as_bits).max, (1, 3, 4, 5, 24),
        generator=torch.Generator().manual_seed(0), device="cpu",
    ).to(torch.get_default_device(), as_bits)  # fmt: skip
    x = bits.view(dtype)
    x[..., ::3, :] = torch.tensor([INF, -INF, NAN, -0.0]).to(dtype).repeat(6)
    bits, x = bits.movedim(-1, 1), x.movedim(-1, 1)
    for op, args in (("pixel_shuffle_3d", ((1, 2, 2),)), ("interleave_time", (2,))):
        y = getattr(kernels, op)(x, *args).contiguous().view(as_bits)
        assert torch.equal(y, getattr(formulas, op)(bits, *args)[0])
    y = kernels.merge_phases(x).contiguous().view(as_bits)
    assert torch.equal(y, formulas.merge_phases(bits)[0])
