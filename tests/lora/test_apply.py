"""Deltas merged into a weight and added in bypass mode, against the dense product in float64."""

import itertools

import pytest
import torch

from fast_video_vae.lora.apply import JoinedPairs
from fast_video_vae.tests.products import each_value_once

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


def dense(low, magnitude=False):
    """Return the delta in float64; with `magnitude`, that of absolute values, for error bounds."""
    parts = [each.double() for each in (low.up, low.amounts, low.down)]
    up, amounts, down = [each.abs() for each in parts] if magnitude else parts
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


@each_value_once(part=PARTS, dtype=DTYPES)
def test_into_weight_rounds_the_sum_once(part, dtype):
    low = made(part, dtype)
    before = torch.randn(OUT, INNER).to(dtype)
    expected = before.double() + dense(low)
    in_another_order = before.T.clone().T
    for owned, stored in itertools.product((False, True), (before, in_another_order)):
        weight = stored.clone()
        result = low.into_weight(weight, owned=owned)
        assert result.dtype == dtype
        assert (result.data_ptr() == weight.data_ptr()) == owned
        assert owned or torch.equal(weight, before)
        # One rounding of `down` times its amounts, one of the sum.
        assert_within(result, expected, dense(low, magnitude=True) + expected.abs())


@each_value_once(part=PARTS, dtype=DTYPES, same=[True, False])
def test_bypass_equals_the_dense_product_for_any_tokens(part, dtype, same):
    """Written in place only into dense outputs; without `same`, pairs are in float32."""
    low = made(part, dtype if same else torch.float32)
    strided = torch.randn(3, INNER, 5).transpose(1, 2)
    tokens = [torch.randn(*shape, INNER) for shape in ((), (7,), (2, 3, 4), (2, 0))]
    for x in (each.to(dtype) for each in (*tokens, strided)):
        y = torch.randn(*x.shape[:-1], 2 * OUT).to(dtype)
        for some in (y[..., :OUT].clone(), y[..., :OUT], y[..., ::2]):
            before, in_place = some.clone(), some.is_contiguous() and low.up.dtype == dtype
            result = low.bypass(some, x)
            assert result.dtype == dtype
            delta, size = x.double() @ dense(low).T, x.double().abs() @ dense(low, True).T
            expected = before.double() + delta
            # Rounded: `x @ down.T`, its product with the amounts; the delta, if it is not added in
            # place; the sum.
            rounded = same * 2 * size + (not in_place) * delta.abs()
            assert_within(result, expected, rounded + expected.abs())
            assert torch.equal(some, result if in_place else before)


@pytest.mark.parametrize("part", [None, (0, 7, 9), (1, 5, 11)], ids=str)
def test_bypass_passes_gradients(part):
    low, weight = made(part, torch.float64), torch.randn(OUT, INNER).double()
    x = torch.randn(3, INNER).double().requires_grad_()
    # The gradient of tanh needs its output, which must not be overwritten.
    assert torch.autograd.gradcheck(lambda x: low.bypass(torch.tanh(x @ weight.T), x), x)
