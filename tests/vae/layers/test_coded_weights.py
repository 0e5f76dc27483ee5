"""Weights in int8: each is rounded once, and the sums of taps are rounded to nearest."""

import pytest
import torch

from fast_video_vae.vae.layers.conv_weights import coded_weight


def random_weight(*shape, kind="normal", seed=0):
    generator = torch.Generator().manual_seed(seed)

    weight = torch.randn(shape, generator=generator)
    return weight**3 if kind == "heavy tails" else weight


def exact_codes(weight, steps, scales):
    """The weights in codes before they are rounded, in float64."""
    wide = weight.double() * steps.double().view(1, -1, *[1] * (weight.ndim - 2))
    return wide / scales.double().view(-1, *[1] * (weight.ndim - 1))


def random_steps(channels, seed=1):
    return torch.rand(channels, generator=torch.Generator().manual_seed(seed)) * 0.05 + 1e-3


@pytest.mark.parametrize(
    ("kind", "taps"),
    [("heavy tails", (3, 3, 3)), ("normal", (3, 3)), ("normal", (1, 1, 1))],
)
def test_a_weight_moves_by_one_step_at_most_and_the_sum_of_its_taps_by_a_half(kind, taps):
    weight, steps = random_weight(24, 16, *taps, kind=kind), random_steps(16)
    before = weight.clone()
    codes, scales = coded_weight(weight, steps)
    assert torch.equal(weight, before)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert codes.shape == weight.shape
    assert scales.shape == (24,)
    exact = exact_codes(weight, steps, scales)
    slack = 1e-4  # of float32: 127 eps of a division, for the sum of 27 taps
    error = (exact - codes).flatten(2)
    moved = codes.flatten(2) != exact.flatten(2).round()
    assert error.abs().max() <= 1 + slack
    assert error[~moved].abs().max() <= 0.5 + slack
    assert error.sum(2).abs().max() <= 0.5 + slack
    # The end of the range is the largest weight of each output channel.
    assert torch.equal(codes.flatten(1).abs().amax(1), torch.full((24,), 127, dtype=torch.int8))
    assert bool(moved.any()) == (weight[0, 0].numel() > 1)


def test_output_channels_of_zeros_stay_zeros():
    weight = random_weight(4, 8, 3, 3, 3)
    weight[2] = 0
    codes, scales = coded_weight(weight, random_steps(8))
    assert not codes[2].any()
    assert scales.isfinite().all()
    assert bool((scales > 0).all())
    assert not (codes[2].float() * scales[2]).any()


@pytest.mark.parametrize("size", [1e-30, 1e36])
def test_extreme_weights_keep_their_codes(size):
    weight, steps = random_weight(8, 8, 3, 3, 3), random_steps(8)
    codes, scales = coded_weight(weight * size, steps)
    assert codes.abs().max() == 127
    assert scales.isfinite().all()
    plain, _ = coded_weight(weight, steps)
    # The products with the scale are rounded in other places.
    assert (codes.int() - plain.int()).abs().max() <= 1
    assert (codes != plain).double().mean() < 1e-3
