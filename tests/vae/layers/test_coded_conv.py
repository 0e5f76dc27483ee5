"""Weights as codes of 8 bits, and a residual block of codes next to its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from fast_video_vae.kernels import code_steps
from fast_video_vae.vae.layers.conv_weights import coded_weight
from fast_video_vae.vae.layers.inputs.coding import Coding, name_convolutions
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.wan_blocks import ResidualBlock

BOTH = ("residual.2", "residual.6")
CPU = torch.device("cpu")


def random_block(into, out, taps=3, *, dtype=torch.float32, seed=0):
    """A block with random weights of the size of those of `random_state_dict`."""
    generator = torch.Generator().manual_seed(seed)
    block = ResidualBlock(into, out, taps).requires_grad_(False)
    for name, parameter in block.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        spread = 0.1 if parameter.ndim < 5 or "gamma" in name else parameter[0].numel() ** -0.5
        parameter.data.copy_(noise * spread + float("gamma" in name))
    assert tuple(name_convolutions(block)) == BOTH
    return block.to(dtype)


def random_video(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_cache(names=BOTH, **options):
    return TemporalCache(coding=Coding(frozenset(names), CPU), **options)


@torch.no_grad()
def streamed(block, video, sizes, cache):
    """The block's results for chunks of the video."""
    results = []
    for chunk in video.split(sizes, dim=2):
        x = chunk.contiguous(memory_format=torch.channels_last_3d)
        results.append(block(x, cache))
        cache.first = False
    return torch.cat(results, dim=2)


class Definition:
    """The block in float64, with the values that its convolutions read rounded to codes.

    Attributes:
        margin: The smallest distance of a value from the border between two codes.
    """

    def __init__(self, block, names=BOTH):
        self.block, self.names, self.margin = block, names, 0.5

    def __call__(self, x):
        parts, block = self.block.residual, self.block
        y = self._conv(self._normed(x.double(), parts["0"]), *self._pair("0", "2"))
        y = self._conv(self._normed(y, parts["3"]), *self._pair("3", "6"))
        if block.shortcut is None:
            return x.double() + y
        weights = block.shortcut.weight.double(), block.shortcut.bias.double()
        return F.conv3d(x.double(), *weights) + y

    def _pair(self, norm, conv):
        return self.block.residual[norm], self.block.residual[conv], f"residual.{conv}"

    def _normed(self, x, norm):
        root = x.square().mean(1, keepdim=True).sqrt()
        return F.silu(x / root * norm.gamma.double())

    def _conv(self, values, norm, conv, name):
        bias = conv.bias.double()
        # The first frame only meets the last tap, which is rounded for itself.
        first, every = conv.weight[:, :, -1:], conv.weight
        if name in self.names:
            steps = code_steps(norm.gamma)
            places = values / steps.double().view(-1, 1, 1, 1) + 17
            self.margin = min(self.margin, (places.frac() - 0.5).abs().min().item())
            # The steps are in the weights.
            values = places.round().clamp(0, 255) - 17
            first, every = (_in_codes(weight, steps) for weight in (first, every))
        values = F.pad(values, (1, 1, 1, 1))
        results = F.conv3d(F.pad(values, (0,) * 4 + (every.shape[2] - 1, 0)), every.double(), bias)
        results[:, :, :1] = F.conv3d(values[:, :, :1], first.double(), bias)
        return results


def _in_codes(weight, steps):
    codes, scales = coded_weight(weight, steps)
    return codes.double() * scales.double().view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("names", "into", "out", "taps"),
    [(BOTH, 16, 32, 3), (BOTH[:1], 8, 8, 3), (BOTH[1:], 8, 16, 1)],
)
def test_a_block_is_its_definition(names, into, out, taps):
    """At the borders, in the first frame and in later chunks."""
    seed = 0
    while True:  # no value is on the border between two codes, where rounding decides
        block, video = random_block(into, out, taps, seed=seed), random_video(1, into, 4, 4, 5)
        definition = Definition(block, names)
        expected = definition(video)
        if definition.margin > 2e-5:
            break
        seed += 1
    for sizes in ([1, 3], [1, 1, 2]):
        result = streamed(block, video, sizes, new_cache(names))
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_values_out_of_range_are_judged_once():
    block, video = random_block(32, 32), random_video(1, 32, 1, 4, 4)
    cache = new_cache()
    streamed(block, video, [1], cache)
    assert cache.coding.verdict() == 0
    video[:, 1:] = 0  # all of a pixel is in one channel: 5.7 deviations
    streamed(block, video, [1], cache)
    assert cache.coding.verdict() == torch.inf
    assert cache.coding.verdict() == 0
    video[0, 0, 0, 0, 0] = torch.nan
    streamed(block, video[:, :, :, :1, :1], [1], new_cache())
    cache = new_cache(BOTH[:1])
    streamed(block, torch.full_like(video, torch.nan), [1], cache)
    assert cache.coding.verdict() == torch.inf


def random_steps(channels):
    return torch.rand(channels, generator=torch.Generator().manual_seed(1)) * 0.05 + 1e-3


@pytest.mark.parametrize("taps", [(3, 3, 3), (3, 3), (1, 1, 1)])
def test_a_weight_moves_by_one_step_at_most_and_the_sum_of_its_taps_by_a_half(taps):
    weight, steps = random_video(24, 16, *taps) ** 3, random_steps(16)  # of heavy tails
    before = weight.clone()
    codes, scales = coded_weight(weight, steps)
    assert torch.equal(weight, before)
    assert (codes.dtype, codes.shape) == (torch.int8, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (24,))
    exact = weight.double() * steps.double().view(1, -1, *[1] * len(taps))
    exact = exact / scales.double().view(-1, *[1] * (weight.ndim - 1))
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
    weight = random_video(4, 8, 3, 3, 3)
    weight[2] = 0
    codes, scales = coded_weight(weight, random_steps(8))
    assert not codes[2].any()
    assert scales.isfinite().all()
    assert (scales > 0).all()
