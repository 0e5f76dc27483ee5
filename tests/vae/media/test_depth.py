"""The depth of written files: a gradient through every codec and back, dither, and conversion."""

import numpy as np
import pytest
import torch

from fast_video_vae.tests.vae.media.gradients import gradient, images, read, written
from fast_video_vae.tests.videos import av, write
from fast_video_vae.vae.media import (
    VideoWriter,
    available_codecs,
    codec_named,
    convert_pictures,
    pictures_of,
)

SIXTEEN = torch.uint16
# Pixel format, and numbers of the matrix, the transfer and the range.
TAGS = {
    "h264": ("yuv420p", 1, 13, 1), "hevc": ("yuv420p10le", 1, 13, 1),
    "av1": ("yuv420p10le", 1, 13, 1), "ffv1": ("gbrp16le", 0, 13, 2),
    "prores": ("yuv422p10le", 1, 1, 1), "prores4444": ("yuv444p12le", 1, 1, 1),
    "png": ("rgb48be", 0, 13, 2),
    "exr": (f"gbrpf{16 if av.library_versions['libavcodec'] >= (62,) else 32}le", 2, 8, 0),
}  # fmt: skip


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
        ("av1", 8 / 1023, 200),
        ("h264", 3 / 255, 100),
    ],
)
def test_a_gradient_keeps_its_depth(tmp_path, codec, most, levels):
    expected = gradient()
    path = written(tmp_path, codec, expected)
    result = read(path)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= most
    assert len(np.unique(result[0, ..., 1])) > levels
    with av.open(str(images(path)[0])) as container:
        frame = next(container.decode(video=0))
        context = container.streams.video[0].codec_context
        found = (context.colorspace, context.color_trc, frame.color_range)
        if codec != "png" or hasattr(frame, "color_trc"):  # PyAV before 17 cannot tag frames
            assert (frame.format.name, *found) == TAGS[codec]


@pytest.mark.parametrize("codec", ["prores", "hevc"])
def test_ten_bits_keep_a_gradient_of_any_size(tmp_path, codec):
    for axis, height, width, frames in (("x", 64, 1024, 1), ("y", 256, 128, 3)):
        expected = gradient(axis, frames, height, width)
        assert np.abs(read(written(tmp_path, codec, expected)) - expected).max() <= 1.5 / 1023


@pytest.mark.parametrize(
    ("codec", "axis", "size"),
    [
        ("h264", "x", (96, 832)),
        ("png", "xy", (256, 512)),
        *(
            pytest.param(codec, axis, (96, 832), marks=pytest.mark.slow)
            for codec in ("h264", "hevc", "vp9", "ffv1") for axis in ("x", "y", "xy")
            if (codec, axis) != ("h264", "x")
        ),
    ],
)  # fmt: skip
def test_dither_keeps_the_mean_and_leaves_no_band(tmp_path, codec, axis, size):
    expected = gradient(axis, 6, *size)
    result = read(written(tmp_path, codec, expected, bit_depth=8, dither=True))
    levels = (result - expected) * 255
    assert np.abs(blocks(levels)).mean() <= 0.05
    assert np.abs(blocks(levels)).max() <= 0.1
    if axis == "x":
        assert widest_band(result[-1, ..., 1]) <= 8


def test_dither_is_on_by_default_for_lossy_files_of_eight_bits_only():
    for codec in available_codecs():
        suffix, lossy = codec_named(codec).suffix, codec_named(codec).lossy
        for depth in codec_named(codec).formats:
            try:
                writer = VideoWriter(f"a{suffix}", 24, codec=codec, bit_depth=depth)
            except ValueError:
                continue  # this build of PyAV lacks the depth
            eight = torch.uint8 if depth == 8 and not lossy else SIXTEEN
            assert writer.dtype == (torch.float32 if codec == "exr" else eight)
    assert VideoWriter("a.mp4", 24, dither=False).dtype == torch.uint8
    assert VideoWriter("a.mkv", 24, codec="ffv1", bit_depth=8, dither=True).dtype == SIXTEEN


@pytest.mark.parametrize(
    ("bits", "size", "channels"),
    [(8, (33, 37), 4), (10, (1, 1), 3), (10, (64, 66), 4), (16, (5, 7), 3)],
)
def test_ffv1_stores_every_value_of_its_depth_in_any_size(tmp_path, bits, size, channels):
    top = 2**bits - 1
    values = np.random.default_rng(0).integers(0, top + 1, (2, *size, channels))
    pictures = torch.from_numpy(np.rint(values * (65535 / top)).astype(np.int32)).to(SIXTEEN)
    for dither in (False, True):  # which leaves what 8 bits hold
        path = write(tmp_path / "a.mkv", pictures, codec="ffv1", bit_depth=bits, dither=dither)
        assert (np.rint(read(path) * top) == values).all()


@pytest.mark.parametrize(
    ("codec", "bits", "dtype"),
    [("exr", 16, torch.float16), ("png", 16, torch.float64), ("ffv1", 8, torch.float32)],
)
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
