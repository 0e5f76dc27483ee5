"""Every op that computes, with every backend, against its formula in float64.

The counts of channels and pixels lie around multiples of vector lengths. Results are written into
memory of NaN inside a longer buffer, and any write outside of it is an error.
"""

from itertools import pairwise, product, starmap

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import (
    DTYPES,
    Poisoned,
    each_dtype,
    random,
    serving,
    some,
    video,
    window,
)

CHANNELS = (1, 2, 3, 7, 12, 15, 16, 17, 31, 32, 33, 96, 160, 384, 1024)

# B, T, H, W: 1, 15, 16, 17, 63, 64 and 65 pixels.
SIZES = (
    (1, 1, 1, 1), (1, 2, 3, 5), (2, 1, 4, 4), (1, 3, 1, 17), (2, 2, 7, 9), (1, 5, 8, 8),
    (1, 1, 5, 13),
)  # fmt: skip

GROUPS = (
    (1, 1), (2, 2), (3, 1), (7, 7), (12, 3), (15, 5), (16, 4), (17, 1), (31, 1), (32, 8), (33, 11),
    (96, 32), (160, 32), (384, 32), (1024, 32),
)  # fmt: skip

each_count = pytest.mark.parametrize("channels", CHANNELS)


@each_count
@each_dtype
def test_rms_norm_silu_equals_its_formula(backend, dtype, channels):
    gamma, numbers = random(2, channels, seed=1)
    for (batch, frames, height, width), silu, bias in some(
        backend, product(SIZES, (True, False), (None, numbers))
    ):
        shape = (batch, channels, frames, height, width)
        x = video(*shape, dtype=dtype)
        before, into = x.clone(), window(*shape, dtype=dtype)
        formulas.holds("rms_norm_silu", x, gamma, silu=silu, bias=bias, into=into)
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("op", "channels"),
    [*(("rms_norm_silu", channels) for channels in (3, 16, 33)), ("group_norm_silu", 12)],
)
@each_dtype
@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_norm_reads_and_updates_its_tail(backend, dtype, op, channels, known):
    weight, bias = random(2, channels, seed=1)
    args, options = (weight,), {"bias": bias}
    if op == "group_norm_silu":
        args, options = (weight, bias, 4), {"eps": 1e-5}
    for frames, batch, given in some(backend, product((1, 2, 3, 5), (1, 2), (True, False))):
        x = video(batch, channels, frames, 3, 5, dtype=dtype)
        tails = Poisoned(batch, known, 3, 5, channels, dtype=dtype)
        tail = tails.memory.movedim(-1, 1)
        tail.copy_(video(*tail.shape, dtype=dtype, seed=2))
        before = tail.clone()
        buffer, out = window(batch, channels, known + frames, 3, 5, dtype=dtype)
        run = getattr(kernels, op)
        result = run(x, *args, **options, tail=tail, out=out if given else None)
        result = buffer.take(out) if given else result
        assert torch.equal(result[:, :, :known], before)
        assert torch.equal(tails.take(tail), result[:, :, frames:])
        expected = getattr(formulas, op)(x, *args, **options)
        formulas.check(result[:, :, known:], *expected, f"{tuple(x.shape)}")


@each_dtype
@pytest.mark.parametrize(("channels", "groups"), GROUPS)
def test_group_norm_silu_equals_its_formula(backend, dtype, channels, groups):
    weight, bias = random(2, channels, seed=1)
    for (batch, frames, height, width), silu in some(backend, product(SIZES, (True, False)), 3):
        shape = (batch, channels, frames, height, width)
        x, into = video(*shape, dtype=dtype), window(*shape, dtype=dtype)
        formulas.holds("group_norm_silu", x, weight, bias, groups, silu=silu, into=into)


@each_dtype
@pytest.mark.parametrize(("channels", "groups"), GROUPS)
def test_group_norm_statistics_equal_their_formula(backend, dtype, channels, groups):
    for batch, frames, height, width in some(backend, SIZES, 3):
        x = video(batch, channels, frames, height, width, dtype=dtype)
        for eps in (1e-6, 0.1):
            actual = kernels.group_norm_statistics(x, groups, eps)
            assert actual.dtype == torch.float32
            assert actual.is_contiguous()
            formulas.holds("group_norm_statistics", x, groups, eps)


@each_dtype
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (7, 7), (12, 3), (33, 3), (96, 32)])
def test_group_norm_silu_uses_given_statistics(backend, dtype, channels, groups):
    """The statistics are not dense."""
    weight, bias = random(2, channels, seed=1)
    for (batch, frames, height, width), silu in some(backend, product(SIZES, (True, False)), 3):
        shape = (batch, channels, frames, height, width)
        x, given = video(*shape, dtype=dtype), random(groups, 2, frames, batch, seed=2)
        options = {"silu": silu, "statistics": given.permute(3, 2, 1, 0)}
        into = window(*shape, dtype=dtype)
        formulas.holds("group_norm_silu", x, weight, bias, groups, into=into, **options)


@each_dtype
@pytest.mark.parametrize("known", [None, 1, 2])
def test_bands_of_rows_with_statistics_equal_the_frame(backend, dtype, known):
    """Equal bit for bit; with `()` as cuts, the one band is the frame."""
    splits = [(), (3,), (1, 2, 7), range(1, 8)]
    sizes = [(1, 1, 5), (16, 2, 4), (6, 2, 5), (33, 3, 5), (12, 4, 5)]
    for (channels, groups, width), cuts, silu in some(
        backend, product(sizes, splits, (True, False)), 3
    ):
        if cuts and backend == "reference" and silu and channels * width % 64:
            continue  # PyTorch's `exp` differs between vectors and their remainder
        weight, bias = random(2, channels, seed=1)
        x = video(2, channels, 3, 8, width, dtype=dtype).mul_(3).add_(5)
        tail = None if known is None else video(2, channels, known, 8, width, dtype=dtype, seed=2)
        mine = None if tail is None else tail.clone()
        whole = kernels.group_norm_silu(x, weight, bias, groups, silu=silu, tail=mine, eps=1e-3)
        assert whole.shape[2] == (known or 0) + 3
        statistics = kernels.group_norm_statistics(x, groups, 1e-3)
        buffer, out = window(*whole.shape, dtype=dtype)
        for rows in starmap(slice, pairwise((0, *cuts, 8))):
            kernels.group_norm_silu(
                x[..., rows, :], weight, bias, groups, eps=7.0, silu=silu, statistics=statistics,
                tail=None if tail is None else tail[..., rows, :], out=out[..., rows, :],
            )  # fmt: skip
        where = f"{channels} channels, {width} columns, {cuts}, silu={silu}"
        assert torch.equal(buffer.take(out), whole), where
        assert tail is None or torch.equal(tail, mine), where


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.0, 1.0), (1e3, 1.0), (1e4, 1.0), (1e4, 0.05), (-300.0, 1e-3)]
)
def test_group_norm_of_a_large_frame_far_from_zero(backend, mean, deviation):
    """A variance computed from the mean of the squares would have an error of `u mean^2`."""
    x = video(1, 16, 1, 160, 208).mul_(deviation).add_(mean)
    both = [kernels.group_norm_statistics(x, 2, 1e-12) for _ in range(2)]
    formulas.check(both[0], *formulas.group_norm_statistics(x, 2, 1e-12))
    assert torch.equal(*both)
    formulas.holds("group_norm_silu", x, *random(2, 16, seed=1), 2)


@each_count
@each_dtype
def test_silu_mul_equals_its_formula(backend, dtype, channels):
    for shape in [(1,), (15,), (3, 17), (2, 3, 11)]:
        x, gate = random(*shape, 2 * channels, dtype=dtype).mul_(4).chunk(2, -1)
        buffer = Poisoned(*shape, channels, dtype=dtype)
        formulas.holds("silu_mul", x, gate, into=(buffer, buffer.memory))


@pytest.mark.parametrize("backend", serving("bias_residual"), indirect=True)
@each_count
@each_dtype
def test_bias_residual_equals_its_formula(backend, dtype, channels):
    bias, other = random(2, channels, seed=1)
    for (batch, frames, height, width), given in some(
        backend, product(SIZES[1:5], product((0, 1), repeat=3))
    ):
        shape = (batch, channels, frames, height, width)
        x, residual = (video(*shape, dtype=dtype, seed=seed) for seed in (2, 3))
        terms = [
            term if there else None
            for term, there in zip((bias, residual, other), given, strict=True)
        ]
        formulas.holds("bias_residual", x, *terms, into=window(*shape, dtype=dtype))


@pytest.mark.parametrize("backend", serving("bias_residual"), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_bias_residual_rounds_once(backend, dtype):
    """Each bias is below half an ulp of 1, both exceed it: rounding every sum would lose them."""
    ulp = torch.finfo(dtype).eps
    x = torch.ones(1, 1, 1, 2, 16, dtype=dtype).movedim(-1, 1)
    bias = torch.full((16,), 0.45 * ulp)
    assert (kernels.bias_residual(x, bias, None, bias) == 1 + ulp).all()


@pytest.mark.parametrize("backend", serving("attention"), indirect=True)
@each_dtype
@pytest.mark.parametrize("shape", [(1, 50, 384), (3, 17, 8), (2, 1, 16), (1, 129, 3), (2, 65, 1)])
def test_attention_equals_its_formula(backend, dtype, shape):
    """Inputs are three tensors, or thirds of one, as a projection makes them."""
    *rows, channels = shape
    formulas.holds("attention", *random(3, *shape, dtype=dtype))
    formulas.holds("attention", *random(*rows, 3 * channels, dtype=dtype).chunk(3, -1))


@pytest.mark.parametrize("backend", serving("average_down"), indirect=True)
@each_dtype
@pytest.mark.parametrize(
    ("before", "after", "times", "size"),
    [
        (4, 4, 1, 2),  # average four pixels
        (4, 8, 2, 2),  # average four pixels, and move frames into channels
        (4, 4, 2, 2),  # average two frames of four pixels
        (8, 4, 2, 2),  # average two channels too
        (4, 8, 1, 2),  # average a row of two pixels
        (4, 16, 1, 2),  # move pixels into channels
        (4, 32, 2, 2),
        (6, 4, 2, 2),  # groups that end within the block of a channel
        (3, 4, 1, 2),  # groups that end within a block of pixels
        (4, 4, 1, 1),  # no change
        (4, 2, 1, 1),
        (33, 33, 2, 2),
        (160, 320, 2, 2),  # the layers of Wan 2.2
        (12, 2, 3, 2),
        (320, 640, 1, 2),
    ],
)
def test_average_down_equals_its_formula(backend, dtype, before, after, times, size):
    for frames, batch in some(backend, product((1, 2, 3, 4, 5), (1, 2)), 3):
        x = video(batch, before, frames, 4, 6, dtype=dtype)
        formulas.holds("average_down", x, after, times=times, size=size)
        actual = kernels.average_down(x, after, times=times, size=size)
        assert actual.movedim(1, -1).is_contiguous()
        assert actual.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("given", [*DTYPES, torch.float64, torch.float8_e4m3fn])
@each_dtype
def test_scales_and_biases_have_any_dtype_and_shape(ask, dtype, given):
    """Checkpoints store them as `[C, 1, 1, 1]`; here they are also strided views."""
    x, grid = video(1, 24, 2, 3, 5, dtype=dtype), video(1, 96, 1, 3, 4, dtype=dtype)
    few = random(2, 48, seed=1).to(given)[:, ::2]
    a, b = few[0].view(24, 1, 1, 1), few[1].view(1, 24)
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    for op, args, keywords, expected in (
        (kernels.rms_norm_silu, (x, a), {}, formulas.rms_norm_silu(x, wide_a)),
        (
            kernels.rms_norm_silu, (x, a), {"bias": b},
            formulas.rms_norm_silu(x, wide_a, bias=wide_b),
        ),
        (
            kernels.group_norm_silu, (x, a, b, 4), {},
            formulas.group_norm_silu(x, wide_a, wide_b, 4),
        ),
        (kernels.bias_residual, (x, a, x, b), {}, formulas.bias_residual(x, wide_a, x, wide_b)),
        (
            kernels.merge_phases, (grid,), {"bias": b},
            formulas.bias_residual(kernels.merge_phases(grid), wide_b),
        ),
    ):  # fmt: skip
        actual = ask(op, *args, **keywords)
        if actual is not None:
            formulas.check(actual, *expected, op.__name__)


@pytest.mark.parametrize("backend", ["native", "reference"], indirect=True)
@each_dtype
def test_results_are_correct_with_several_threads(backend, dtype):
    """The parts have different sizes, and the last one is short."""
    shape = (1, 48, 3, 37, 83)
    x, residual = video(*shape, dtype=dtype), video(*shape, dtype=dtype, seed=1)
    weight, bias = random(2, 48, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        formulas.holds("rms_norm_silu", x, weight)
        formulas.holds("group_norm_silu", x, weight, bias, 12)
        formulas.holds("bias_residual", x, bias, residual, weight)
        formulas.holds("group_norm_statistics", x, 12)
    finally:
        torch.set_num_threads(before)
