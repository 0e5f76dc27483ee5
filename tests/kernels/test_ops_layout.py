"""Every op that moves numbers, with every backend: each number is where the contract puts it."""

from itertools import product

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.tests.kernels import formulas
from fast_video_vae.tests.kernels.cases import (
    PLAYED,
    Poisoned,
    each_dtype,
    random,
    serving,
    some,
    video,
    window,
)
from fast_video_vae.tests.products import each_value_once

CHANNELS = (1, 2, 3, 7, 12, 15, 16, 17, 31, 32, 33, 96, 160)
SIZES = ((1, 1), (3, 5), (4, 4), (1, 17), (7, 9), (8, 8), (5, 13))

each_count = pytest.mark.parametrize("channels", CHANNELS)


def check_places(op, x, *args, expected):
    """Compare bit for bit, written to `out` and to the new channels-last result."""
    buffer, out = window(*expected.shape, dtype=x.dtype)
    assert op(x, *args, out=out) is out
    assert torch.equal(buffer.take(out), expected)
    fresh = op(x, *args)
    assert torch.equal(fresh, expected)
    assert fresh.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("backend", serving("interleave_time"), indirect=True)
@each_count
@each_dtype
def test_interleave_time_spreads_the_channels_over_frames(backend, dtype, channels):
    for phases, (height, width), frames, batch in some(
        backend, product((1, 2, 3), SIZES[:4], (1, 2), (1, 2))
    ):
        x = video(batch, phases * channels, frames, height, width, dtype=dtype)
        expected = torch.stack(x.chunk(phases, 1), 3).flatten(2, 3)
        check_places(kernels.interleave_time, x, phases, expected=expected)


def merged(grid):
    """Place pixel `(2 i + a, 2 j + b)`: phase `2 a + b` of the window at `(i + a, j + b)`."""
    channels, height, width = grid.shape[1] // 4, grid.shape[3] - 1, grid.shape[4] - 1
    out = grid.new_empty(grid.shape[0], channels, grid.shape[2], 2 * height, 2 * width)
    for a, b in product((0, 1), (0, 1)):
        first = (2 * a + b) * channels
        phase = grid[:, first : first + channels]
        out[..., a::2, b::2] = phase[..., a : a + height, b : b + width]
    return out


@pytest.mark.parametrize("backend", serving("merge_phases"), indirect=True)
@each_count
@each_dtype
def test_merge_phases_takes_each_pixel_from_its_window(backend, dtype, channels):
    for (height, width), frames, batch in some(backend, product(SIZES[:4], (1, 2, 3), (1, 2))):
        grid = video(batch, 4 * channels, frames, height + 1, width + 1, dtype=dtype)
        check_places(kernels.merge_phases, grid, expected=merged(grid))
        bias = random(channels, seed=1)
        biased = kernels.merge_phases(grid, bias=bias)
        formulas.check(biased, *formulas.bias_residual(merged(grid), bias), f"{grid.shape}")


def duplicated(x, channels, times, first):
    """Return the term that `merge_phases` adds for `source`, one channel at a time."""
    batch, before, frames, height, width = x.shape
    y = torch.full((batch, channels, frames * times, 2 * height, 2 * width), torch.nan)
    y = y.to(x.dtype)
    for c, p, a, b in product(range(channels), range(times), (0, 1), (0, 1)):
        source = ((c * times + p) * 4 + 2 * a + b) * before // (4 * times * channels)
        y[:, c, p::times, a::2, b::2] = x[:, source]
    return y[:, :, times - 1 :] if first else y


@pytest.mark.parametrize("backend", serving("merge_phases"), indirect=True)
@each_dtype
@pytest.mark.parametrize(
    ("before", "after", "times"),
    [
        (8, 8, 2),  # every pixel and frame repeats its own channel
        (8, 4, 1),  # a channel for each row of the new pixels
        (8, 2, 1),  # a channel for each new pixel
        (8, 1, 2),  # a channel for each new pixel and frame
        (16, 2, 2),
        (4, 8, 1),  # more output channels than input channels
        (6, 3, 2),
        (12, 9, 1),  # three pixels share a channel: no stride, only an index
        (33, 33, 2),  # longer than a vector, with a remainder
        (64, 32, 2),  # the layers of Wan 2.2
        (64, 16, 1),
    ],
)
def test_merge_phases_adds_the_repeated_source(backend, dtype, before, after, times):
    for (frames, first), batch in some(
        backend, product(((1, True), (1, False), (3, False)), (1, 2)), 3
    ):
        x = video(batch, before, frames, 3, 5, dtype=dtype, seed=1)
        added = duplicated(x, after, times, first)
        grid = video(batch, 4 * after, added.shape[2], 4, 6, dtype=dtype, seed=2)
        for bias in (None, random(after, seed=3)):
            buffer, out = window(*added.shape, dtype=dtype)
            assert kernels.merge_phases(grid, x, times, bias=bias, out=out) is out
            expected = formulas.bias_residual(merged(grid), bias, added)
            formulas.check(buffer.take(out), *expected, f"{frames} frames, first={first}")
        assert kernels.merge_phases(grid, x, times).movedim(1, -1).is_contiguous()


def shuffled(x, size, order):
    """Place every number by its channel index; `order` names the letters slowest first."""
    sizes = dict(zip("thw", size, strict=True))
    sizes["c"] = x.shape[1] // (size[0] * size[1] * size[2])
    strides, stride = {}, 1
    for letter in reversed(order):
        strides[letter], stride = stride, stride * sizes[letter]
    batch, _, frames, height, width = x.shape
    out = x.new_empty(batch, sizes["c"], frames * size[0], height * size[1], width * size[2])
    channels = torch.arange(sizes["c"]) * strides["c"]
    for t, h, w in product(*(range(n) for n in size)):
        index = channels + t * strides["t"] + h * strides["h"] + w * strides["w"]
        out[:, :, t :: size[0], h :: size[1], w :: size[2]] = x[:, index]
    return out


@pytest.mark.parametrize("backend", serving("pixel_shuffle_3d"), indirect=True)
@each_dtype
@pytest.mark.parametrize("order", ["cthw", "ctwh", "hwtc", "wcht"])
@pytest.mark.parametrize("size", [(1, 2, 2), (2, 2, 2), (3, 1, 2), (1, 1, 1), (2, 1, 1)])
def test_pixel_shuffle_3d_puts_every_number_in_its_place(backend, dtype, size, order):
    for channels, frames, batch in some(backend, product((1, 3, 16, 33), (1, 3), (1, 2)), 5):
        x = video(batch, channels * size[0] * size[1] * size[2], frames, 3, 5, dtype=dtype)
        expected = shuffled(x, size, order)
        check_places(kernels.pixel_shuffle_3d, x, size, order, expected=expected)


@pytest.mark.parametrize("to", [torch.float32, torch.float16])
def test_pixel_shuffle_3d_writes_another_dtype_and_any_strides_or_refuses(ask, to):
    x = video(2, 12, 2, 3, 5, dtype=torch.bfloat16)
    expected = shuffled(x, (1, 2, 2), "ctwh").to(to)
    for axes in [(0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (2, 4, 0, 3, 1)]:  # order of the axes in memory
        back = [axes.index(dim) for dim in range(5)]
        buffer = Poisoned(*(expected.shape[dim] for dim in axes), dtype=to)
        out = buffer.memory.permute(back)
        actual = ask(kernels.pixel_shuffle_3d, x, (1, 2, 2), "ctwh", out=out)
        assert actual is None or torch.equal(buffer.take(actual), expected)


def images(frames, to, bits=16):
    """Return `clamp((x + 1) / 2, 0, 1)`, channels last, in float32.

    uint8 drops the fraction; uint16 of `bits` bits rounds the product, to nearest even.
    """
    y = ((frames.float() + 1) * 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).flatten(0, 1)
    if to == torch.uint8:
        return (y.nan_to_num(0) * 255).floor().to(to)
    if to == torch.uint16:
        return (y.nan_to_num(0) * (2**bits - 1)).double().round().int().to(to)
    return y.to(to)


# Dtypes of images, and bits of those in uint16.
INTEGERS = [(torch.uint8, 16), (torch.uint16, 10), (torch.uint16, 12), (torch.uint16, 16)]
FORMATS = [(torch.float32, 16), *INTEGERS]

each_format = pytest.mark.parametrize(("to", "bits"), FORMATS)


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
@each_dtype
@each_format
@pytest.mark.parametrize("size", SIZES)
def test_frames_to_images_equal_the_formula_bit_for_bit(backend, dtype, to, bits, size):
    for channels, frames, batch in some(backend, product((1, 3, 4, 16), (1, 3), (1, 2)), 5):
        x = video(batch, channels, frames, *size, dtype=dtype)  # a third is out of range
        expected = images(x, to, bits)
        fresh = kernels.frames_to_images(x, dtype=to, bits=bits)
        assert torch.equal(fresh, expected)
        assert fresh.is_contiguous()
        for joined in (True, False):
            buffer = Poisoned(batch, frames, *size, channels, dtype=to)
            out = buffer.memory.flatten(0, 1) if joined else buffer.memory
            assert kernels.frames_to_images(x, bits=bits, out=out) is out
            assert torch.equal(buffer.take(out), expected.view(out.shape))


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
@each_dtype
@each_value_once(form=FORMATS, order=["cthw", "ctwh", "hwtc"], patch=[2, 3])
def test_frames_to_images_unfolds_patches(backend, dtype, form, patch, order):
    to, bits = form
    for channels, (height, width) in some(backend, product((1, 3, 4), SIZES)):
        x = video(2, channels * patch**2, 2, height, width, dtype=dtype)
        expected = images(shuffled(x, (1, patch, patch), order), to, bits)
        buffer = Poisoned(*expected.shape, dtype=to)
        out = buffer.memory
        options = {"patch": patch, "order": order, "bits": bits, "out": out}
        assert kernels.frames_to_images(x, **options) is out
        assert torch.equal(buffer.take(out), expected)


@each_dtype
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64])
def test_frames_to_images_of_other_dtypes_or_a_refusal(ask, dtype, to):
    x = video(2, 12, 2, 5, 7, dtype=dtype)
    for frames, patch in ((x, 1), (shuffled(x, (1, 2, 2), "cthw"), 2)):
        actual = ask(kernels.frames_to_images, x, dtype=to, patch=patch)
        assert actual is None or torch.equal(actual, images(frames, to))


@pytest.mark.parametrize(("to", "bits"), FORMATS[:3])
def test_frames_to_images_writes_any_strides_or_refuses(ask, to, bits):
    """Write planes, a part of a wider image, pixels with a fourth number, every other image."""
    x = video(1, 3, 4, 6, 10)
    expected = images(x, to, bits)
    for shape, view in [
        ((4, 3, 6, 10), lambda memory: memory.permute(0, 2, 3, 1)),
        ((4, 6, 20, 3), lambda memory: memory[:, :, 7:17]),
        ((4, 6, 10, 4), lambda memory: memory[..., :3]),
        ((9, 6, 10, 3), lambda memory: memory[1::2]),
    ]:
        buffer = Poisoned(*shape, dtype=to)
        out = view(buffer.memory)
        actual = ask(kernels.frames_to_images, x, bits=bits, out=out)
        assert actual is None or torch.equal(buffer.take(actual), expected), shape


def around(steps):
    """Return float32 numbers around `steps`, float64 values of images, and special numbers."""
    nearest = (2 * steps - 1).float()
    x = [nearest]
    for towards in (-2.0, 2.0):
        moved = nearest
        for _ in range(3):
            moved = moved.nextafter(torch.tensor(towards))
            x.append(moved)
    return torch.cat([*x, torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0])])


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
@each_dtype
@each_format
def test_images_are_exact_for_all_numbers(backend, dtype, to, bits):
    """Test all numbers of a 16-bit dtype, and float32 numbers around each of the steps."""
    white = {torch.float32: 1, torch.uint8: 255}.get(to, 2**bits - 1)
    if dtype == torch.float32:
        first = 0.5 if to == torch.uint16 else 0.0  # rounded in the middle, or dropped
        x = around((torch.arange(-1, white + 2, dtype=torch.float64) + first) / white)
    else:
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x.view(1, 1, 1, 1, -1)
    actual, expected = kernels.frames_to_images(x, dtype=to, bits=bits), images(x, to, bits)
    if to == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
@pytest.mark.parametrize("bits", [10, 12, 16])
def test_16_bit_images_round_the_rounded_product_half_to_even(backend, bits):
    """Float32 numbers around 1,024 of the middles; a product in one rounding would differ."""
    white = 2**bits - 1
    x = around((torch.arange(0, white + 1, 2**bits // 1024, dtype=torch.float64) + 0.5) / white)
    x = x.view(1, 1, 1, 1, -1)
    actual = kernels.frames_to_images(x, dtype=torch.uint16, bits=bits).flatten()
    image = images(x, torch.float32).flatten().nan_to_num(0)
    product, exact = (image * white).double(), image.double() * white
    floor = product.floor()
    half = product == floor + 0.5
    expected = torch.where(half, floor + floor % 2, (product + 0.5).floor())
    assert half.sum() > 100
    assert (exact.round() != expected).any()
    assert torch.equal(actual.double(), expected)


@pytest.mark.parametrize("backend", serving("frames_to_images"), indirect=True)
def test_images_of_many_frames_equal_single_frames(backend):
    """The frames have more numbers than a block."""
    x = video(1, 3, 5, *((40, 56) if backend in PLAYED else (240, 416)))
    together = kernels.frames_to_images(x, dtype=torch.uint8)
    apart = [kernels.frames_to_images(x[:, :, [t]], dtype=torch.uint8) for t in range(5)]
    assert torch.equal(together, torch.cat(apart))
    assert torch.equal(together, images(x, torch.uint8))


def test_random_inputs_have_no_equal_numbers():
    """Otherwise a number in a wrong place could pass unnoticed."""
    x = random(1, 2, 3, 4, 5)
    assert x.unique().numel() == x.numel()
