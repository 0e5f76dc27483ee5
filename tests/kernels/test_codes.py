"""Norms that write 8-bit codes: every code, border, tail and count, against formulas in float64.

A code is that of the formula, or its neighbour where the value is between two codes within the
error of float32. Results are written into memory of 173 inside a longer buffer.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import DTYPES, PLAYED, Poisoned, random, video, window

OPS = ("rms_norm_silu", "group_norm_silu")
ZERO = 17
CODES = {torch.uint8: 0, torch.int8: 128}

each_op = pytest.mark.parametrize("op", OPS)
writing = pytest.mark.parametrize("backend", ["reference", "native", "cuda"], indirect=True)

# Codes in int8 are those of GPUs.
FORMS = {
    "reference": (torch.uint8, torch.int8),
    "native": (torch.uint8, torch.int8),
    "cuda": (torch.int8,),
}


def arguments(op, channels):
    """Return the arguments after `x`, and the options."""
    weight, bias = random(2, channels, seed=1)
    groups = next(n for n in (4, 5, 3, 1) if channels % n == 0)
    return ((weight,), {"bias": bias}) if op == OPS[0] else ((weight, bias, groups), {})


def counters():
    """Return counters that are not 0: a call adds to them."""
    return torch.tensor([1000, 100], dtype=torch.int64)


def agrees(result, saturated, value, error, codes, where):
    """Compare codes and counts of new frames, `[B, C, T, H, W]`, with the formula."""
    factors = codes.double().view(-1, 1, 1, 1)
    exact, bound = value * factors, error * factors.abs()
    bound = bound + (exact.abs() + bound) * 2.0**-23 + 1e-30
    lowest = torch.round(exact - bound) + ZERO
    highest = torch.round(exact + bound) + ZERO
    actual = result.int() + CODES[result.dtype]
    missing = exact.isnan()
    assert (actual[missing] == ZERO).all(), f"{where}: NaN"
    inside = ~missing
    assert (actual >= lowest.clamp(0, 255))[inside].all(), f"{where}: too small"
    assert (actual <= highest.clamp(0, 255))[inside].all(), f"{where}: too large"
    # Values that are outside, and those that may be.
    sure = ((lowest > 255) | (highest < 0))[inside].sum().item()
    possible = ((highest > 255) | (lowest < 0))[inside].sum().item()
    assert sure - 1 < saturated[0].item() - 1000 < possible + 1, where
    assert saturated[1].item() - 100 == missing.sum().item(), where


def compared(op, x, dtype, *, known=0, border=0, factor=30.0, silu=True):
    """Run a call with codes of `dtype`, and compare all that it writes."""
    batch, channels, frames, height, width = x.shape
    args, options = arguments(op, channels)
    codes = random(channels, seed=4).abs().add_(0.1).mul_(factor)
    tails = Poisoned(batch, known, height, width, channels, dtype=dtype)
    before = random(batch, channels, known, height, width, seed=2).mul_(40).to(dtype)
    tail = tails.memory.movedim(-1, 1).copy_(before) if known else None
    shape = batch, channels, known + frames, height + 2 * border, width + 2 * border
    buffer, out = window(*shape, dtype=dtype)
    saturated = counters()
    result = getattr(kernels, op)(
        x, *args, **options, silu=silu, tail=tail, out=out, border=border, codes=codes,
        saturated=saturated,
    )  # fmt: skip
    assert result is out
    result = buffer.take(out)
    where = f"{op} of {tuple(x.shape)}, {x.dtype} to {dtype}, known {known}, border {border}"
    value, error = getattr(formulas, op)(x, *args, **options, silu=silu)
    inner = result[..., border : border + height, border : border + width]
    agrees(inner[:, :, known:], saturated, value, error, codes, where)
    surrounded = F.pad(inner.int() + CODES[dtype], (border,) * 4, value=ZERO)
    assert torch.equal(result.int() + CODES[dtype], surrounded), where
    assert torch.equal(inner[:, :, :known], before), where
    if tail is not None:
        assert torch.equal(tails.take(tail), inner[:, :, frames:]), where
    return saturated - counters()


def cases(backend, count):
    """Return about `count` products of sizes, input and result dtypes, tails, borders and SiLU.

    None: all. Otherwise an emulated GPU has one input dtype, because each is compiled.
    """
    dtypes = (torch.bfloat16,) if count and backend in PLAYED else DTYPES
    every = list(product(SIZES, dtypes, FORMS[backend], (0, 1, 2), (0, 1), (True, False)))
    return every[:: len(every) // count | 1] if count else every


SIZES = (
    (1, 1, 2, 3, 5),
    (2, 3, 1, 5, 7),
    (1, 20, 3, 4, 3),  # some packs on a CPU, single numbers on a GPU
    (2, 96, 2, 3, 5),
    (1, 24, 1, 1, 1),
    (1, 520, 2, 2, 3),  # longer than the registers of a team
)


@writing
@each_op
@pytest.mark.parametrize("count", [24, pytest.param(None, marks=pytest.mark.slow)])
def test_codes_are_those_of_the_formula(backend, op, count):
    for size, narrow, dtype, known, border, silu in cases(backend, count):
        x = video(*size, dtype=narrow)
        compared(op, x, dtype, known=known, border=border, silu=silu)


@writing
@each_op
@pytest.mark.parametrize("factor", [200.0, 1e4, 1e8, 1e30, 3e37])
def test_values_beyond_both_ends_are_counted(backend, op, factor):
    """Also those whose product with the factor is beyond the integers, or infinite."""
    x = video(1, 24, 2, 5, 3, dtype=torch.bfloat16)
    for dtype in FORMS[backend]:
        outside, missing = compared(op, x, dtype, known=1, factor=factor, silu=False)
        assert outside > x.numel() / 4
        assert missing == 0


@writing
@each_op
@pytest.mark.parametrize("channels", [3, 20, 96])
def test_nan_has_the_code_of_zero_and_is_counted(backend, op, channels):
    """The counted values are those of the pixels or groups that have a NaN, not of a border."""
    x = video(2, channels, 2, 3, 5, dtype=torch.bfloat16)
    x[0, 1, 1, 2, 3] = x[1, 0, 0, 0, 0] = torch.nan
    for dtype in FORMS[backend]:
        _, missing = compared(op, x, dtype, known=2, border=1)
        assert missing == (2 * channels if op == OPS[0] else missing)
        assert missing >= 2 * 15 * channels / 5 or op == OPS[0]


@writing
def test_ties_are_rounded_to_even_and_both_ends_are_exact(backend):
    """With one channel the norm is the sign of a number, so that codes are exact."""
    halves = torch.tensor([-18.5, -17.5, -17.0, -2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 237.5, 238.5, 239])
    expected = torch.tensor([0, 0, 0, 15, 15, 17, 17, 17, 19, 255, 255, 255])
    weight, bias = torch.zeros(12), halves
    x = video(1, 12, 1, 1, 1)
    saturated = counters()
    for dtype in FORMS[backend]:
        out = torch.empty(1, 1, 1, 1, 12, dtype=dtype).movedim(-1, 1)
        kernels.group_norm_silu(
            x, weight, bias, 3, silu=False, out=out, codes=torch.ones(12), saturated=saturated
        )
        assert torch.equal(out.flatten().int() + CODES[dtype], expected.int())
    assert saturated.tolist() == [1000 + 3 * len(FORMS[backend]), 100]


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@each_op
def test_two_threads_write_the_codes_and_counts_of_one(backend, op):
    x = video(1, 96, 3, 40, 33, dtype=torch.bfloat16)
    x[0, 5, 1, 7, 8] = torch.nan
    args, options = arguments(op, 96)
    codes, found = random(96, seed=4).mul_(200), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tail, saturated = torch.full((1, 2, 40, 33, 96), 9, dtype=torch.uint8), counters()
            y = getattr(kernels, op)(
                x, *args, **options, tail=tail.movedim(-1, 1), border=1, codes=codes,
                saturated=saturated,
            )  # fmt: skip
            found.append((y, tail, saturated))
    finally:
        torch.set_num_threads(before)
    assert found[0][2][0] > 1000
    assert found[0][2][1] > 100
    assert all(map(torch.equal, *found))


@writing
@each_op
def test_a_call_without_codes_is_the_same_before_and_after(backend, op):
    args, options = arguments(op, 24)
    x = video(1, 24, 2, 3, 5, dtype=torch.bfloat16)
    plain = getattr(kernels, op)(x, *args, **options)
    compared(op, x, FORMS[backend][-1])
    assert torch.equal(getattr(kernels, op)(x, *args, **options), plain)


@each_op
def test_the_cpu_writes_uint8_without_a_given_result(op):
    args, options = arguments(op, 24)
    x = video(1, 24, 2, 3, 5)
    for backend in ("native", "reference"):
        with use_backend(backend):
            y = getattr(kernels, op)(
                x, *args, **options, codes=torch.ones(24), saturated=counters()
            )
        assert y.dtype == torch.uint8


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@each_op
def test_gpu_kernels_refuse_uint8(backend, op):
    args, options = arguments(op, 24)
    x, saturated = video(1, 24, 2, 3, 5), counters()
    out = torch.zeros(1, 2, 3, 5, 24, dtype=torch.uint8).movedim(-1, 1)
    with pytest.raises(BackendError, match="there is no kernel for codes in uint8"):
        getattr(kernels, op)(
            x, *args, **options, out=out, codes=torch.ones(24), saturated=saturated
        )
    assert not out.count_nonzero()
    assert torch.equal(saturated, counters())


@pytest.mark.parametrize("backend", ["native", "cuda"], indirect=True)
@each_op
def test_counters_that_are_not_adjacent_and_shared_memory_are_refused(backend, op):
    args, options = arguments(op, 24)
    x, codes = video(1, 24, 2, 3, 5), torch.ones(24)
    out = torch.zeros(1, 2, 3, 5, 24, dtype=torch.int8).movedim(-1, 1)
    apart = torch.zeros(4, dtype=torch.int64)[::2]
    call = getattr(kernels, op)
    with pytest.raises(BackendError, match="the numbers of saturated are not adjacent"):
        call(x, *args, **options, out=out, codes=codes, saturated=apart)
    # The same address and strides, but another size of a number.
    same = x.movedim(1, -1).view(torch.int8).as_strided(out.shape, out.stride())
    assert same.stride() == x.stride()
    with pytest.raises(BackendError, match="out overlaps the memory of x"):
        call(x, *args, **options, out=same, codes=codes, saturated=counters())
