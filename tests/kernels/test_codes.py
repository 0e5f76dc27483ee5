"""Norms for a convolution behind them: frames with a border of zeros, and 8-bit codes.

The oracles are the formulas in float64. A code is that of the formula, or its neighbour where the
value is between two codes within the error of float32. Results are written into memory of NaN, 173
or -83 inside a longer buffer.
"""

from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import DTYPES, PLAYED, Poisoned, random, video, window

OPS = ("rms_norm_silu", "group_norm_silu")
ZERO = 17
LIFTED = {torch.uint8: 0, torch.int8: 128}

each_op = pytest.mark.parametrize("op", OPS)

# Dtypes of codes; None: the norm writes numbers. A CUDA kernel has those of GPUs.
FORMS = dict.fromkeys(ORDER, (None, torch.uint8, torch.int8)) | {"cuda": (None, torch.int8)}

SIZES = (
    (1, 1, 2, 3, 5),
    (2, 3, 1, 5, 7),
    (1, 20, 3, 4, 3),  # some packs on a CPU, single numbers on a GPU
    (2, 96, 2, 3, 5),
    (1, 24, 1, 1, 1),
    (1, 160, 3, 7, 9),  # several tiles, which begin within a row
    (1, 520, 2, 2, 3),  # longer than the registers of a team
    (1, 12, 3, 13, 1),
)


def arguments(op, channels):
    weight, bias = random(2, channels, seed=1)
    groups = next(n for n in (4, 5, 3, 1) if channels % n == 0)
    if op == OPS[0]:
        return (weight,), {"bias": bias}
    return (weight, bias, groups), {"eps": 1e-5}


def counters():
    return torch.tensor([1000, 100], dtype=torch.int64)


def coded(channels, factor=30.0):
    codes = random(channels, seed=4).abs().add_(0.1).mul_(factor)
    return {"codes": codes, "saturated": counters()}


def agrees(result, saturated, value, error, codes, where):
    """Compare codes and counts of new frames, `[B, C, T, H, W]`, with the formula."""
    factors = codes.double().view(-1, 1, 1, 1)
    # A number next to an infinite one is 0 exactly, but the bound of its error is NaN.
    exact, bound = value * factors, (error * factors.abs()).nan_to_num(0)
    bound = bound + (exact.abs() + bound) * 2.0**-23 + 1e-30
    lowest = torch.round(exact - bound) + ZERO
    highest = torch.round(exact + bound) + ZERO
    actual = result.int() + LIFTED[result.dtype]
    missing = exact.isnan()
    assert (actual[missing] == ZERO).all(), f"{where}: NaN"
    inside = ~missing
    assert (actual >= lowest.clamp(0, 255))[inside].all(), f"{where}: too small"
    assert (actual <= highest.clamp(0, 255))[inside].all(), f"{where}: too large"
    # Values that are outside, and those that may be.
    sure = ((lowest > 255) | (highest < 0))[inside].sum().item()
    possible = ((highest > 255) | (lowest < 0))[inside].sum().item()
    assert sure <= saturated[0].item() - 1000 <= possible, where
    assert saturated[1].item() - 100 == missing.sum().item(), where


def same(one, two):
    return torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


def compared(op, x, form, *, known=None, border=0, factor=30.0, silu=True):
    """Run a call, compare all that it writes with the formula, and return its counts.

    Numbers without SiLU are in new memory.
    """
    batch, channels, frames, height, width = x.shape
    dtype, count = form or x.dtype, known or 0
    args, options = arguments(op, channels)
    given = coded(channels, factor) if form else {}
    tails = Poisoned(batch, count, height, width, channels, dtype=dtype)
    before = random(batch, channels, count, height, width, seed=2).mul_(40).to(dtype)
    tail = None if known is None else tails.memory.movedim(-1, 1).copy_(before)
    shape = batch, channels, count + frames, height + 2 * border, width + 2 * border
    buffer, out = window(*shape, dtype=dtype)
    run = getattr(kernels, op)
    into = out if form or silu else None
    result = run(x, *args, **options, **given, silu=silu, tail=tail, out=into, border=border)
    assert result is out or into is None
    assert result.movedim(1, -1)[0, 0].is_contiguous()
    result = result if into is None else buffer.take(out)
    where = f"{op} of {tuple(x.shape)}, {x.dtype} to {form}, known {known}, border {border}"
    inner = result[..., border : border + height, border : border + width]
    zero = ZERO - LIFTED[form] if form else 0
    assert same(result, F.pad(inner, (border,) * 4, value=zero)), where
    assert torch.equal(inner[:, :, :count], before), where
    assert tail is None or same(tails.take(tail), inner[:, :, frames:]), where
    value, error = getattr(formulas, op)(x, *args, **options, silu=silu)
    if form is None:
        formulas.check(inner[:, :, count:], value, error.nan_to_num(0), where)
        return 0, 0
    agrees(inner[:, :, count:], given["saturated"], value, error, given["codes"], where)
    return (given["saturated"] - counters()).tolist()


@each_op
def test_borders_tails_and_codes_are_those_of_the_formula(backend, op):
    """An emulated GPU has one input dtype by default, because each is compiled."""
    played, draw = backend in PLAYED, Random(3)
    every = list(product(FORMS[backend], (None, 0, 1, 2, 4), (0, 1, 2)))
    for form, known, border in every[:: 4 if played else 1]:
        dtype = torch.bfloat16 if played else draw.choice(DTYPES)
        size = draw.choice(SIZES)
        # Every fourth has few borders: on an emulated GPU it follows the tail.
        border = (border + (known or 0)) % 3 if played else border
        silu = draw.random() < 0.5
        compared(op, video(*size, dtype=dtype), form, known=known, border=border, silu=silu)


@each_op
def test_values_beyond_both_ends_are_counted(backend, op):
    """Also those whose product with the factor is beyond the integers, or infinite."""
    x = video(1, 20, 2, 5, 3, dtype=torch.bfloat16)
    for form, factor in product(FORMS[backend][-1:], (200.0, 1e8, 3e37)):
        outside, missing = compared(op, x, form, known=1, factor=factor, silu=False)
        assert outside > x.numel() / 4
        assert missing == 0


@each_op
@pytest.mark.parametrize("channels", [3, 20])
def test_nan_has_the_code_of_zero_and_is_counted(backend, op, channels):
    """The counted values are those of the pixels or groups that have a NaN, not of a border."""
    x = video(2, channels, 2, 3, 5, dtype=torch.bfloat16)
    x[0, 1, 1, 2, 3] = x[1, 0, 0, 0, 0] = torch.nan
    x[1, 2, 1, 0, 4] = torch.inf
    for form in FORMS[backend]:
        _, missing = compared(op, x, form, known=2, border=1)
        least = 2 * channels + 1 if op == OPS[0] else 3 * 15 * channels / 5
        assert form is None or missing >= least


def test_ties_are_rounded_to_even_and_both_ends_are_exact(backend):
    """With one channel the norm is the sign of a number, so that codes are exact."""
    halves = torch.tensor([-18.5, -17.5, -17.0, -2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 237.5, 238.5, 239])
    expected = torch.tensor([0, 0, 0, 15, 15, 17, 17, 17, 19, 255, 255, 255])
    weight, bias = torch.zeros(12), halves
    x, saturated = video(1, 12, 1, 1, 1), counters()
    for form in FORMS[backend][1:]:
        out = torch.empty(1, 1, 1, 1, 12, dtype=form).movedim(-1, 1)
        kernels.group_norm_silu(
            x, weight, bias, 3, silu=False, out=out, codes=torch.ones(12), saturated=saturated
        )
        assert torch.equal(out.flatten().int() + LIFTED[form], expected.int())
    assert saturated.tolist() == [1000 + 3 * (len(FORMS[backend]) - 1), 100]


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@each_op
def test_two_threads_write_the_codes_and_counts_of_one(backend, op):
    """In new memory, of the dtype of the device."""
    x = video(1, 96, 3, 40, 33, dtype=torch.bfloat16)
    x[0, 5, 1, 7, 8] = torch.nan
    args, options = arguments(op, 96)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            given = coded(96, 200.0)
            tail = torch.full((1, 2, 40, 33, 96), 9, dtype=torch.uint8).movedim(-1, 1)
            y = getattr(kernels, op)(x, *args, **options, tail=tail, border=1, **given)
            found.append((y, tail, given["saturated"]))
    finally:
        torch.set_num_threads(before)
    assert y.dtype == kernels.code_dtype(x.device) == torch.uint8
    assert min(found[0][2] - counters()) > 0
    assert all(map(torch.equal, *found))


def refusals(backend, x):
    out = torch.zeros(x.shape, dtype=torch.int8).to(memory_format=torch.channels_last_3d)
    given = coded(x.shape[1])
    # The same address and strides, but another size of a number.
    aliased = x.movedim(1, -1).view(torch.int8).as_strided(out.shape, out.stride())
    yield x, {**given, "out": aliased}, "out overlaps the memory of x"
    buffer = video(1, x.shape[1], 3, 3, 4)
    # A frame of one row has the strides of a bordered one.
    bordered = {"out": buffer[:, :, :1], "border": 1}
    yield buffer[:, :, :1, :1, :2], bordered, "out overlaps the memory of x"
    if backend == "triton":
        return
    apart = torch.zeros(4, dtype=torch.int64)[::2]
    reason = "the numbers of saturated are not adjacent"
    yield x, {**given, "saturated": apart, "out": out}, reason
    yield x[..., :0, :], {"border": 1}, "the tensor is empty"
    if backend == "cuda":
        yield x, {**given, "out": out.byte()}, "there is no kernel for uint8"


@pytest.mark.parametrize("backend", ["native", "cuda", "triton"], indirect=True)
@each_op
def test_calls_that_a_backend_cannot_run_are_refused(backend, op):
    args, options = arguments(op, 24)
    for x, given, reason in refusals(backend, video(1, 24, 2, 3, 5)):
        before = given["out"].clone() if "out" in given else None
        with pytest.raises(BackendError, match=reason):
            getattr(kernels, op)(x, *args, **options, **given)
        assert before is None or torch.equal(given["out"], before)
        assert "saturated" not in given or given["saturated"].tolist() in ([0, 0], [1000, 100])
