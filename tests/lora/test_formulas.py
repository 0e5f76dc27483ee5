"""Deltas on a weight or in bypass mode against float64, their rounding, and the too weak ones."""

import itertools

import pytest
import torch
from torch import nn

from fast_video_vae.lora.deltas import JoinedPairs, make_function
from fast_video_vae.lora.precision import is_weak, rms_of

OUT, INNER, RANK = 24, 16, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTS = [None, (0, 0, 8), (0, 7, 9), (0, 23, 1), (1, 5, 11), (1, 0, 16)]


def made(part, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = [OUT, INNER]
    if part is not None:
        sizes[part[0]] = part[2]
    down, up = torch.randn(RANK, sizes[1]).to(dtype), torch.randn(sizes[0], RANK).to(dtype)
    return JoinedPairs(down, up, torch.linspace(-1, 2, RANK), part)


def dense(low, of=torch.Tensor.double):
    """Return the delta in float64; with another `of`, that of its values, for error bounds."""
    up, amounts, down = (of(each.double()) for each in (low.up, low.amounts, low.down))
    delta = torch.zeros(OUT, INNER, dtype=torch.float64)
    part = delta if low.part is None else delta.narrow(*low.part)
    part += up * amounts @ down
    return delta


def assert_within(result, expected, roundings):
    """Compare with half an eps of each rounded number, and the errors of float32 sums."""
    assert result.shape == expected.shape
    error, bound = (result.double() - expected).abs(), torch.finfo(result.dtype).eps / 2 * roundings
    sums = 3e-6 * expected.abs().clamp(min=1).amax() if expected.numel() else 0
    assert (error <= bound * 1.01 + sums).all(), error.max()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("part", "dtype"), [*zip(PARTS, DTYPES * 2, strict=True)])
def test_a_delta_is_rounded_once_in_a_weight_and_in_an_output(part, dtype, same):
    """Written in place only where it may be; without `same`, pairs of outputs are in float32."""
    low, weight = made(part, dtype), torch.randn(OUT, INNER).to(dtype)
    expected = weight.double() + dense(low)
    for owned, stored in itertools.product((False, True), (weight, weight.T.clone().T)):
        given = stored.clone()
        result = low.into_weight(given, owned=owned)
        assert (result.data_ptr() == given.data_ptr()) == owned
        assert owned or torch.equal(given, weight)
        # One rounding of `down` times its amounts, one of the sum.
        assert_within(result, expected, dense(low, torch.abs) + expected.abs())
    low = low if same else made(part)
    tokens = [torch.randn(*shape, INNER) for shape in ((), (2, 3, 4), (2, 0))]
    for x in (each.to(dtype) for each in (*tokens, torch.randn(3, INNER, 5).mT)):
        y = torch.randn(*x.shape[:-1], 2 * OUT).to(dtype)
        for some in (y[..., :OUT].clone(), y[..., ::2]):
            before, in_place = some.clone(), some.is_contiguous()
            result = low.bypass(some, x)
            delta, size = x.double() @ dense(low).T, x.double().abs() @ dense(low, torch.abs).T
            expected = before.double() + delta
            # Rounded: `x @ down.T`, its product with the amounts; the delta, if it is not added in
            # place; the sum.
            rounded = same * 2 * size + (not in_place) * delta.abs()
            assert_within(result, expected, rounded + expected.abs())
            assert torch.equal(some, result if in_place else before)


def test_dora_is_rounded_once_and_the_weight_is_not_written():
    parts = {"up": torch.randn(8, 4), "down": torch.randn(4, 6), "magnitude": torch.randn(8)}
    function, weight = make_function(parts, (8, 6)), torch.randn(8, 6, 2).bfloat16()[..., 0]
    before = weight.clone()
    rounded = function.apply(weight.float(), 0.5).bfloat16()
    assert torch.equal(function.apply(nn.Parameter(weight), 0.5), rounded)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_delta_is_weak_where_rounded_sums_lose_three_percent(dtype):
    torch.manual_seed(0)
    weight, normal = (0.02 * torch.randn(512, 512)).to(dtype), torch.randn(512, 512).double()
    size = rms_of(weight)
    for factor in (0.1, 0.25, 0.4, 0.6, 1.0, 4.0):
        rms = factor * torch.finfo(dtype).eps * size
        added = (weight + rms * normal).to(dtype).double() - weight.double()
        share = float((added * normal).sum() / (rms * normal.square().sum()))
        assert is_weak(rms, size, dtype) == (share < 0.97)
    assert is_weak(1.0, None, dtype)  # packed weights
    assert not is_weak(0.0, size, dtype)
