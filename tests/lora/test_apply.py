"""Deltas merged into a weight and added in bypass mode, against the dense product in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from fast_video_vae.lora.apply import JoinedPairs, break_even

OUT, INNER, RANK = 24, 16, 8
LOW_DTYPES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *LOW_DTYPES]
PARTS = [None, (0, 0, 8), (0, 7, 9), (0, 23, 1), (1, 0, 4), (1, 5, 11), (0, 0, 24), (1, 0, 16)]
TOKENS = [(), (1,), (5,), (2, 3), (2, 3, 4), (0,), (2, 0)]


def made(part=None, dtype=torch.float32, rank=RANK, inner=INNER, out=OUT):
    torch.manual_seed(0)
    if part is not None:
        out, inner = (part[2], inner) if part[0] == 0 else (out, part[2])
    down, up = torch.randn(rank, inner).to(dtype), torch.randn(out, rank).to(dtype)
    return JoinedPairs(down, up, torch.linspace(-1, 2, rank), part)


def dense(low, shape=(OUT, INNER), magnitude=False):
    """Return the delta in float64; with `magnitude`, that of absolute values, for error bounds."""
    parts = [each.double() for each in (low.up, low.amounts, low.down)]
    up, amounts, down = [each.abs() for each in parts] if magnitude else parts
    delta = torch.zeros(shape, dtype=torch.float64).flatten(1)
    part = delta if low.part is None else delta.narrow(*low.part)
    part += up * amounts @ down
    return delta.view(shape)


def assert_within(result, expected, bound):
    """Compare each element, and add the errors of float32 sums to `bound`."""
    error = (result.double() - expected).abs()
    assert (error <= bound * 1.01 + 3e-6 * expected.abs().clamp(min=1).max()).all(), error.max()


def half_eps(dtype):
    return torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_into_weight_rounds_the_sum_once(part, dtype):
    low = made(part, dtype)
    before = torch.randn(OUT, INNER).to(dtype)
    expected = before.double() + dense(low)
    # One rounding of `down` times its amounts, one of the sum.
    bound = half_eps(dtype) * (dense(low, magnitude=True) + expected.abs())
    in_another_order = before.T.clone().T
    for owned, stored in itertools.product((False, True), (before, in_another_order)):
        weight = stored.clone()
        result = low.into_weight(weight, owned=owned)
        assert result.dtype == dtype
        assert (result.data_ptr() == weight.data_ptr()) == owned
        assert owned or torch.equal(weight, before)
        assert_within(result, expected, bound)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("part", [None, (0, 4, 8), (1, 1, 3)], ids=str)
def test_a_kernel_with_a_delta_keeps_its_shape(part, owned):
    shape = 12, 4, 1, 2, 2
    low = made(None, inner=16, out=12)
    if part is not None:
        low = made((0, 0, part[2]), inner=16) if part[0] == 0 else made(inner=part[2] * 4, out=12)
        low = JoinedPairs(low.down, low.up, low.amounts, part)
    weight = torch.randn(shape)
    expected = weight.double().clone()
    target = expected if part is None else expected.narrow(*part)
    target += (low.up.double() * low.amounts.double() @ low.down.double()).view(target.shape)
    result = low.into_weight(weight, owned=owned)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert result.shape == shape


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_bypass_equals_the_dense_product_for_any_tokens(part):
    low = made(part)
    strided = torch.randn(3, INNER, 5).transpose(1, 2)
    for x in (*(torch.randn(*tokens, INNER) for tokens in TOKENS), strided):
        y = torch.randn(*x.shape[:-1], OUT)
        expected = y.double() + x.double() @ dense(low).T
        result = low.bypass(y.clone(), x)
        assert result.shape == y.shape
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("same", [True, False])
def test_bypass_rounding_is_within_its_bound(part, dtype, same):
    """With `same`, pairs have the dtype of the layer; else they are in float32."""
    low = made(part, dtype if same else torch.float32)
    x, y = torch.randn(7, INNER).to(dtype), torch.randn(7, OUT).to(dtype)
    result = low.bypass(y.clone(), x)
    assert result.dtype == dtype
    delta = x.double() @ dense(low).T
    size = x.double().abs() @ dense(low, magnitude=True).T
    # Rounded: `x @ down.T`, its product with the amounts, the sum; or the delta and the sum.
    roundings = 2 * size if same else delta.abs()
    assert_within(result, y.double() + delta, half_eps(dtype) * (roundings + (y + delta).abs()))


@pytest.mark.parametrize("part", [None, (0, 7, 9), (1, 5, 11)], ids=str)
def test_bypass_writes_in_place_only_to_dense_outputs(part):
    low, x = made(part), torch.randn(2, 3, INNER)
    y = torch.randn(2, 3, OUT)
    assert low.bypass(y, x).data_ptr() == y.data_ptr()
    base = torch.randn(2, 3, 2 * OUT)
    for y in (base[..., :OUT], base[..., ::2], torch.randn(3, 2, OUT).transpose(0, 1)):
        before = y.clone()
        expected = y.double() + x.double() @ dense(low).T
        result = low.bypass(y, x)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(y, before)


@pytest.mark.parametrize("part", [None, (0, 7, 9), (1, 5, 11)], ids=str)
def test_bypass_passes_gradients(part):
    low = made(part)
    x = torch.randn(5, INNER, requires_grad=True)
    weight = torch.randn(OUT, INNER, requires_grad=True)
    y = torch.tanh(F.linear(x, weight))  # the gradient of tanh needs its output
    factor = torch.randn(5, OUT)
    (low.bypass(y, x) * factor).sum().backward()
    inside = factor.double() * (1 - y.detach().double() ** 2)
    expected = inside @ weight.detach().double() + factor.double() @ dense(low)
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)
    expected = inside.T @ x.detach().double()
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("inner", "out", "tokens"),
    [  # by hand: 4 * in * out bytes against n * (in + 2 * out)
        (5120, 5120, 6827),
        (5120, 13824, 8640),
        (13824, 5120, 11765),
        (3072, 3072, 4096),
    ],
)
def test_stream_and_bypass_move_equal_bytes_at_break_even(inner, out, tokens):
    assert round(break_even(inner, out)) == tokens
