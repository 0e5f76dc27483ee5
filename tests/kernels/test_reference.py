"""Features that only the reference has: float64, gradients, blocks and fallback attention."""

import importlib
import math

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import use_backend
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import DTYPES, OPS, Poisoned, inputs, random, video

# Imported by name: the package also has a function `attention`.
memory = importlib.import_module("fast_video_vae.kernels.reference.memory")
fallback = importlib.import_module("fast_video_vae.kernels.reference.attention")


@pytest.fixture(autouse=True)
def reference():
    with use_backend("reference"):
        yield


def test_float64_stays_float64():
    x, other = (video(2, 12, 3, 4, 6, dtype=torch.float64, seed=seed) for seed in (0, 1))
    weight, bias = random(2, 12, dtype=torch.float64, seed=2)
    for op, args, options in (
        ("rms_norm_silu", (x, weight), {"bias": bias}),
        ("group_norm_silu", (x, weight, bias, 3), {}),
        ("group_norm_statistics", (x, 3), {}),
        ("silu_mul", (x.movedim(1, -1), other.movedim(1, -1)), {}),
        ("bias_residual", (x, weight, other, bias), {}),
        ("attention", random(3, 2, 20, 8, dtype=torch.float64).unbind(), {}),
        ("average_down", (x, 6), {"times": 2, "size": 2}),
    ):
        actual = getattr(kernels, op)(*args, **options)
        value, error = getattr(formulas, op)(*args, **options)
        assert actual.dtype == torch.float64
        formulas.check(actual, value, 2 * error)  # the formula is computed in float64 too


def test_group_norm_statistics_round_the_mean_once():
    """The mean, near 10000, is the nearest float32; this does not affect the deviations, near 1."""
    x = video(1, 16, 1, 40, 52).add_(1e4)
    value, _ = formulas.group_norm_statistics(x, 2)
    means, inverses = kernels.group_norm_statistics(x, 2)[0, 0]
    assert torch.equal(means, value[0, 0, 0].float())
    torch.testing.assert_close(inverses.double(), value[0, 0, 1], rtol=1e-6, atol=0)


def test_group_norm_silu_is_as_accurate_as_its_statistics():
    x, (weight, bias) = video(1, 16, 1, 40, 52).add_(1e4), random(2, 16, seed=1)
    statistics = kernels.group_norm_statistics(x, 2)
    value, _ = formulas.group_norm_silu(x, weight, bias, 2, statistics=statistics)
    actual = kernels.group_norm_silu(x, weight, bias, 2)
    torch.testing.assert_close(actual.double(), value, rtol=0, atol=5e-6)


@pytest.mark.parametrize("banded", [False, True])
def test_statistics_have_gradients(banded):
    """The gradient is the same whether the statistics are computed before or in the call."""
    weight, bias = random(2, 12, dtype=torch.float64, seed=1)
    grads = []
    for apart in (False, True):
        x = video(2, 12, 3, 4, 5, dtype=torch.float64).requires_grad_()
        leaves = [x, weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        options = {"statistics": kernels.group_norm_statistics(x, 3)} if apart else {}
        bands = x.split(2, dim=3) if banded and apart else [x]
        y = torch.cat(
            [kernels.group_norm_silu(band, *leaves[1:], 3, **options) for band in bands], dim=3
        )
        grads.append(torch.autograd.grad((y * random(*y.shape, seed=2)).sum(), leaves))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_of_given_statistics_equal_differences():
    x, (weight, bias) = video(1, 4, 2, 2, 3, dtype=torch.float64), random(2, 4, dtype=torch.float64)
    given = kernels.group_norm_statistics(x, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda numbers: kernels.group_norm_silu(x, weight, bias, 2, statistics=numbers), given
    )


@pytest.mark.parametrize("op", OPS)
def test_gradients_equal_differences(op):
    """Compare with central differences in float64, in one direction for all tensors together."""
    args, keywords = inputs(op, torch.float64)
    leaves = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    # Keep away from the corners of the clamp, which have no derivative.
    args = [arg.double() * 0.2 if n in leaves else arg for n, arg in enumerate(args)]
    ways = {n: random(*args[n].shape, dtype=torch.float64, seed=10 + n) for n in leaves}

    def loss(step):
        moved = [arg + step * ways[n] if n in ways else arg for n, arg in enumerate(args)]
        for n in leaves:
            moved[n] = moved[n].detach().requires_grad_(step == 0)
        copies = {  # a tail is overwritten
            name: value.double().clone() if isinstance(value, torch.Tensor) else value
            for name, value in keywords.items()
        }
        y = getattr(kernels, op)(*moved, **copies)
        weights = random(*y.shape, dtype=torch.float64, seed=5)
        return (y.double() * weights).sum(), moved

    value, moved = loss(0)
    grads = torch.autograd.grad(value, [moved[n] for n in leaves])
    slope = sum((grad * way).sum() for grad, way in zip(grads, ways.values(), strict=True))
    step = 1e-3 if op == "frames_to_images" else 1e-5  # its arithmetic is float32
    difference = (loss(step)[0] - loss(-step)[0]) / (2 * step)
    torch.testing.assert_close(slope, difference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_results_with_autograd_equal_those_without(op, dtype):
    args, keywords = inputs(op, dtype)
    expected = getattr(kernels, op)(*args, **keywords)
    args, keywords = inputs(op, dtype)
    result = getattr(kernels, op)(args[0].clone().requires_grad_(), *args[1:], **keywords)
    assert result.requires_grad
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(result.detach(), expected, rtol=2 * eps, atol=2e-6)
    if result.ndim == 5:
        assert result.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("op", ["rms_norm_silu", "group_norm_silu"])
def test_the_tail_is_not_written_with_autograd(op):
    """The tail is read, with a gradient; a write would invalidate its recorded uses."""
    args, keywords = inputs(op, torch.float32)
    tail = keywords["tail"].clone().requires_grad_()
    out = getattr(kernels, op)(*args, **(keywords | {"tail": tail}))
    out.sum().backward()
    assert torch.equal(tail.detach(), inputs(op, torch.float32)[1]["tail"])
    assert (tail.grad == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["rms_norm_silu", "silu_mul", "bias_residual"])
def test_results_with_autograd_may_overwrite_the_input(op, dtype):
    args, _ = inputs(op, dtype)
    grads = []
    for in_place in (False, True):
        leaf = args[0].clone().requires_grad_()
        x = leaf * 1
        y = getattr(kernels, op)(x, *args[1:], out=x if in_place else None)
        y.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_results_in_a_longer_buffer_have_gradients():
    """The input of a causal convolution is made in this way."""
    x = video(1, 8, 2, 3, 3).requires_grad_()
    buffer = Poisoned(1, 4, 3, 3, 8, dtype=torch.float32)
    window = buffer.memory.movedim(-1, 1)
    window[:, :, :2].zero_()
    kernels.rms_norm_silu(x, torch.ones(8), out=window[:, :, 2:])
    window.sum().backward()
    (expected,) = torch.autograd.grad(kernels.rms_norm_silu(x, torch.ones(8)).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(set(OPS) - {"attention"}))
def test_blocks_do_not_change_a_result(op, dtype, monkeypatch):
    args, keywords = inputs(op, dtype)
    expected = getattr(kernels, op)(*args, **keywords)
    for elements in (1, 100, 1000):  # less than a row, than several rows, than a frame
        monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", elements)
        args, keywords = inputs(op, dtype)
        actual = getattr(kernels, op)(*args, **keywords)
        if op in ("group_norm_silu", "group_norm_statistics", "rms_norm_silu", "silu_mul"):
            # The order of sums differs, and `exp` differs between vectors and their remainder.
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=2e-6)
        else:
            assert torch.equal(actual, expected)


def test_blocks_cover_every_number_once(monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_ELEMENTS", 50)
    for shape in ((3, 5, 7, 4), (1, 1, 40, 4), (2, 100), (1, 60), (5,), (0, 4), (6, 1, 1, 1)):
        x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        parts = [part.clone() for part in memory.copies(x, torch.float32)]
        assert torch.equal(torch.cat([part.flatten() for part in [*parts, x[:0]]]), x.flatten())
        assert all(part.numel() <= max(50, shape[-1]) for part in parts)


@pytest.mark.parametrize("shape", [(1, 50, 384), (3, 17, 8), (2, 1, 16)])
def test_attention_without_a_fused_kernel_runs_in_blocks(shape, monkeypatch):
    """Devices other than CPUs and CUDA GPUs have no fused kernel."""
    monkeypatch.setattr(fallback, "_fused_attention_takes", lambda *_: False)
    monkeypatch.setattr(fallback, "_SCORE_ELEMENTS", 4 * shape[0] * shape[1])
    formulas.holds("attention", *random(3, *shape))
