"""The depth of written files: a gradient through every codec and back, dither, and speed."""

import numpy as np
import pytest
import torch

from fast_video_vae.tests.vae.media.gradients import (
    FRAMES,
    HEIGHT,
    WIDTH,
    gradient,
    read,
    written,
)
from fast_video_vae.tests.videos import write
from fast_video_vae.vae.media import (
    VideoWriter,
    available_codecs,
    codec_named,
    convert_pictures,
    pictures_of,
)
from fast_video_vae.vae.media.pictures import dithered

SIXTEEN = torch.uint16


def blocks(error):
    """Means over 16 x 16 blocks of `[T, H, W, C]`."""
    frames, height, width, channels = error.shape
    cut = error[:, : height // 16 * 16, : width // 16 * 16]
    return cut.reshape(frames, height // 16, 16, width // 16, 16, channels).mean(axis=(2, 4))


def widest_band(values):
    """The longest run of equal 8-bit values along `[H, W]`, in pixels."""
    changes = np.diff(np.rint(values * 255), axis=1) != 0
    edges = [np.flatnonzero(np.r_[True, row, True]) for row in changes]
    return max(np.diff(each).max() for each in edges)


@pytest.mark.parametrize(
    ("codec", "most", "levels"),
    [
        ("ffv1", 1 / 65535, 800),
        ("png", 1 / 65535, 800),
        ("exr", 2**-11, 700),  # half floats; the curve of sRGB flattens their steps
        ("prores", 1.5 / 1023, 256),
        ("prores4444", 1.5 / 1023, 256),
        ("hevc", 1.5 / 1023, 256),
    ],
)
def test_a_gradient_keeps_its_depth(tmp_path, codec, most, levels):
    expected = gradient()
    path = written(tmp_path, codec, expected)
    result = read(path)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= most
    assert len(np.unique(result[0, ..., 1])) > levels


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("codec", ["prores", "hevc"])
def test_ten_bits_keep_a_gradient_of_any_size(tmp_path, codec, axis, frames):
    for height, width in ((64, 1024), (256, 1024), (1024, 96), (128, 128)):
        expected = gradient(axis, frames, height, width)
        result = read(written(tmp_path, codec, expected))
        assert np.abs(result - expected).max() <= 1.5 / 1023


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (64, 1024), (256, 512)])
@pytest.mark.parametrize("axis", ["x", "y", "xy"])
@pytest.mark.parametrize("codec", ["h264", "hevc", "vp9", "ffv1", "png"])
def test_dither_keeps_the_mean_and_leaves_no_band(tmp_path, codec, axis, size):
    expected = gradient(axis, FRAMES, *size)
    result = read(written(tmp_path, codec, expected, bit_depth=8, dither=True))
    levels = (result - expected) * 255
    assert np.abs(blocks(levels)).mean() <= 0.05
    assert np.abs(blocks(levels)).max() <= 0.1
    if axis == "x":
        assert widest_band(result[-1, ..., 1]) <= 8


def test_dither_is_on_by_default_for_lossy_files_of_eight_bits_only():
    for codec in available_codecs():
        suffix = codec_named(codec).suffix
        for depth in codec_named(codec).formats:
            try:
                writer = VideoWriter(f"a{suffix}", 24, codec=codec, bit_depth=depth)
            except ValueError:
                continue  # this build of PyAV lacks the depth
            lossless_8 = depth == 8 and not codec_named(codec).lossy
            assert writer.dtype == (
                torch.float32 if codec == "exr" else torch.uint8 if lossless_8 else SIXTEEN
            )
    assert VideoWriter("a.mp4", 24, dither=False).dtype == torch.uint8
    assert VideoWriter("a.mkv", 24, codec="ffv1", bit_depth=8, dither=True).dtype == SIXTEEN


def test_dither_is_exact_where_eight_bits_suffice():
    bytes_ = np.arange(256, dtype=np.uint16).reshape(16, 16, 1)
    assert (dithered(bytes_ * 257) == bytes_).all()
    flat = np.full((16, 16, 3), 257 * 10 + 128, np.uint16)
    assert dithered(flat).mean() == pytest.approx((257 * 10 + 128) / 257, abs=0.05)


@pytest.mark.parametrize("bits", [8, 10, 16])
@pytest.mark.parametrize("channels", [3, 4])
def test_ffv1_stores_every_value_of_its_depth(tmp_path, bits, channels):
    top = 2**bits - 1
    values = np.random.default_rng(0).integers(0, top + 1, (2, 33, 37, channels))
    pictures = torch.from_numpy(np.rint(values * (65535 / top)).astype(np.int32)).to(SIXTEEN)
    path = tmp_path / "a.mkv"
    with VideoWriter(path, 24, codec="ffv1", bit_depth=bits) as writer:
        writer.write(pictures)
    assert (np.rint(read(path) * top) == values).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("codec", "bits"), [("exr", 16), ("png", 16), ("ffv1", 8)])
def test_values_beyond_the_range_are_clamped_and_nan_is_black(tmp_path, codec, bits, dtype):
    values = torch.tensor([torch.nan, torch.inf, 2, -1, 1, 0]).to(dtype).requires_grad_()
    pictures = values.view(1, 1, 6, 1).expand(1, 1, 6, 3)
    path = write(tmp_path / f"a{codec_named(codec).suffix}", pictures, codec=codec, bit_depth=bits)
    assert read(path)[0, 0, :, 0] == pytest.approx([0, 1, 1, 0, 1, 0], abs=1e-9)


def test_pictures_are_converted_as_the_decoder_does():
    frames = torch.empty(1, 3, 2, 9, 7).uniform_(-1.2, 1.2)
    floats = pictures_of(frames, torch.float32)
    assert torch.equal(convert_pictures(floats, torch.uint8), pictures_of(frames, torch.uint8))
    assert torch.equal(convert_pictures(floats, SIXTEEN).int(), pictures_of(frames, SIXTEEN).int())
    eight = pictures_of(frames, torch.uint8)
    assert torch.equal(convert_pictures(convert_pictures(eight, SIXTEEN), torch.uint8), eight)
