"""Every op of the reference against its formula in float64."""

import itertools
import math

import pytest
import torch

from fast_video_vae.kernels import (
    attention,
    average_down,
    interleave_time,
    merge_phases,
    reference,
    rms_norm_silu,
)


def channels_last(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).contiguous(memory_format=torch.channels_last_3d)


def norm_formula(x, gamma, silu):
    x = x.double()
    norm = x.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    y = x / norm * math.sqrt(x.shape[1]) * gamma.double().view(1, -1, 1, 1, 1)
    return y * torch.sigmoid(y) if silu else y


# Half an eps for the one rounding of the result; float32 adds the roundings of its own steps.
TOLERANCE = {
    torch.float64: 1e-6,  # the scale is kept in float32
    torch.float32: 1e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 96, 3, 8, 8),
        (3, 24, 2, 5, 7),  # a batch: rows of one video at a time
        (1, 7, 1, 1, 1),  # one pixel, odd channels
    ],
)
def test_rms_norm_silu_is_its_formula(shape, silu, dtype):
    x = channels_last(*shape, dtype=dtype)
    gamma = torch.rand(shape[1]) + 0.5
    expected = norm_formula(x, gamma, silu)
    actual = rms_norm_silu(x, gamma, silu=silu)
    assert actual.dtype == dtype
    assert actual.stride() == x.stride()
    error = (actual.double() - expected).abs() / expected.abs().clamp_min(1e-3)
    assert error.max() <= TOLERANCE[dtype] * 1.01


def test_rms_norm_silu_of_zeros_is_zero():
    assert not rms_norm_silu(torch.zeros(1, 8, 1, 2, 2), torch.ones(8)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_silu_writes_every_element_of_a_slice_and_nothing_else(dtype, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1000)  # several blocks, the last one short
    x = channels_last(2, 12, 3, 6, 9, dtype=dtype)
    window = torch.full((2, 5, 6, 9, 12), math.nan, dtype=dtype).movedim(-1, 1)
    rms_norm_silu(x, torch.ones(12), out=window[:, :, 2:])
    assert window[:, :, :2].isnan().all()
    assert torch.equal(window[:, :, 2:], rms_norm_silu(x, torch.ones(12)))


def test_rms_norm_silu_leaves_its_input_alone():
    x = channels_last(1, 8, 2, 4, 4)
    before = x.clone()
    rms_norm_silu(x, torch.ones(8))
    assert torch.equal(x, before)


def test_rms_norm_silu_has_the_gradient_of_its_formula():
    x = channels_last(1, 6, 2, 3, 3).double().requires_grad_()
    gamma = torch.rand(6, dtype=torch.float64).requires_grad_()
    weights = torch.randn_like(x)
    (rms_norm_silu(x, gamma).double() * weights).sum().backward()
    ours = x.grad.clone(), gamma.grad.clone()
    x.grad = gamma.grad = None
    (norm_formula(x, gamma, silu=True) * weights).sum().backward()
    torch.testing.assert_close(ours, (x.grad, gamma.grad), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocked", [False, True], ids=["fused", "blocked"])
@pytest.mark.parametrize("shape", [(1, 50, 384), (3, 17, 8), (2, 1, 16)])
def test_attention_is_its_formula(shape, blocked, monkeypatch):
    if blocked:  # what other devices than CPUs and CUDA cards run, in blocks of a few queries
        monkeypatch.setattr(reference, "_fused_attention_takes", lambda *_: False)
        monkeypatch.setattr(reference, "_SCORE_ELEMENTS", 4 * shape[1])
    q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    scores = q.double() @ k.double().transpose(1, 2) / math.sqrt(shape[2])
    expected = torch.softmax(scores, -1) @ v.double()
    torch.testing.assert_close(attention(q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_interleave_time_spreads_the_channels_over_frames(phases):
    x = channels_last(2, 6 * phases, 3, 4, 5)
    expected = x.unflatten(1, (phases, 6)).movedim(1, 3).flatten(2, 3)  # the phase is faster
    actual = interleave_time(x, phases)
    assert torch.equal(actual, expected)
    assert actual.is_contiguous(memory_format=torch.channels_last_3d)


def test_interleave_time_fills_a_poisoned_buffer():
    x = channels_last(1, 8, 2, 3, 3)
    out = torch.full((1, 4, 3, 3, 4), math.nan).movedim(-1, 1)
    assert interleave_time(x, 2, out=out) is out
    assert torch.equal(out, interleave_time(x, 2))


@pytest.mark.parametrize("size", [(4, 5), (1, 1), (1, 6)])
def test_merge_phases_takes_each_pixel_from_its_window(size):
    height, width = size
    grid = channels_last(2, 4 * 3, 2, height + 1, width + 1)
    actual = merge_phases(grid)
    assert actual.shape == (2, 3, 2, 2 * height, 2 * width)
    assert actual.is_contiguous(memory_format=torch.channels_last_3d)
    for row in range(2 * height):
        for column in range(2 * width):
            (i, a), (j, b) = divmod(row, 2), divmod(column, 2)
            first = (2 * a + b) * 3
            expected = grid[:, first : first + 3, :, i + a, j + b]
            assert torch.equal(actual[:, :, :, row, column], expected)


def duplicated(x, channels, times, first):
    """What `merge_phases` says that it adds, number by number."""
    batch, before, frames, height, width = x.shape
    y = torch.full((batch, channels, frames * times, 2 * height, 2 * width), torch.nan)
    for c, p, a, b in itertools.product(range(channels), range(times), (0, 1), (0, 1)):
        source = ((c * times + p) * 4 + 2 * a + b) * before // (4 * times * channels)
        y[:, c, p::times, a::2, b::2] = x[:, source]
    return y[:, :, times - 1 :] if first else y


@pytest.mark.parametrize(
    ("before", "after", "times"),
    [
        (8, 8, 2),  # every pixel and frame repeats its own channel
        (8, 4, 1),  # a channel for each row of the new pixels
        (8, 2, 1),  # one for each new pixel
        (8, 1, 2),  # one for each new pixel and frame
        (16, 2, 2),
        (4, 8, 1),  # more channels than there are
        (6, 3, 2),
        (12, 9, 1),  # three pixels share a channel: no stride, only an index
    ],
)
@pytest.mark.parametrize(("frames", "first"), [(1, True), (1, False), (3, False)])
def test_phases_are_merged_with_the_repeated_source(before, after, times, frames, first):
    x = channels_last(2, before, frames, 3, 5, seed=1)
    expected = duplicated(x, after, times, first)
    grid = channels_last(2, 4 * after, expected.shape[2], 4, 6, seed=2)
    expected = merge_phases(grid) + expected
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            merged = merge_phases(grid, x, times)
        torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)
        assert merged.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize(
    ("before", "after", "times", "size"),
    [
        (4, 4, 1, 2),  # four pixels into one
        (4, 8, 2, 2),  # and frames into channels
        (4, 4, 2, 2),  # two frames of four pixels into one
        (8, 4, 2, 2),  # and two channels
        (4, 8, 1, 2),  # a row of pixels each
        (4, 16, 1, 2),  # pixels into channels
        (4, 32, 2, 2),
        (6, 4, 2, 2),
        (4, 4, 1, 1),  # nothing
        (4, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_blocks_are_averaged_by_their_definition(before, after, times, size, frames):
    x = channels_last(2, before, frames, 4, 6, seed=3)
    padded = torch.cat([x.new_zeros(2, before, -frames % times, 4, 6), x], dim=2).double()
    blocks = padded.unflatten(4, (-1, size)).unflatten(3, (-1, size)).unflatten(2, (-1, times))
    # [B, C, t, p, h, a, w, b] -> [B, C, p, a, b, t, h, w]
    channels = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    expected = channels.unflatten(1, (after, -1)).mean(dim=2)
    result = average_down(x, after, times=times, size=size)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)
    assert result.movedim(1, -1).is_contiguous()
    assert result.data_ptr() != x.data_ptr()
