"""Pictures that are read: exact RGB, the formula of BT.709, EXR, pixels that are not square, clips.

`golden/frames.safetensors` has what was read of six clips of all kinds, every second or fourth
pixel, by a reader that scaled to 16 bits format by format (2026-11, FFmpeg 8.1).
"""

import logging
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, moving_clip, pieces_of, write_planes, write_with
from fast_video_vae.vae.media import read_video, video_reader

# Matrix numbers of ISO/IEC 23091-2 and their weights of red and blue.
WEIGHTS = {1: (0.2126, 0.0722), 2: (0.299, 0.114), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}
HEIGHT, WIDTH = 32, 48


def numbers(bits, *shape, low=0, high=None, seed=0):
    """Random numbers of `bits`, with the smallest and the largest."""
    high = (1 << bits) - 1 if high is None else high
    found = np.random.default_rng(seed).integers(low, high + 1, shape)
    found.flat[:2] = low, high
    return found


def wide(picture):
    """The numbers of a uint16 tensor."""
    assert picture.dtype == torch.uint16
    return picture.numpy().astype(np.float64)


def rgb_of(y, cb, cr, bits, matrix=1, full=False):
    """The formula of ITU-R BT.709, BT.601 and BT.2020 for numbers of `bits`: RGB in [0, 1]."""
    red, blue = WEIGHTS[matrix]
    step, most = 1 << (bits - 8), (1 << bits) - 1
    black, luma, chroma = (0, most, most) if full else (16 * step, 219 * step, 224 * step)
    y, cb, cr = (y - black) / luma, (cb - 128 * step) / chroma, (cr - 128 * step) / chroma
    r, b = y + (2 - 2 * red) * cr, y + (2 - 2 * blue) * cb
    g = (y - red * r - blue * b) / (1 - red - blue)
    return np.clip(np.stack([r, g, b], axis=-1), 0, 1)


@pytest.mark.parametrize(
    ("suffix", "codec", "pix_fmt", "order", "count"),
    [
        ("mkv", "ffv1", "gbrp16le", [[1], [2], [0]], 2),
        ("png", "png", "rgba64be", [[0, 1, 2, 3]], 1),  # transparent pixels have colors too
    ],
)
def test_lossless_rgb_keeps_its_numbers(tmp_path, suffix, codec, pix_fmt, order, count):
    pictures = [numbers(16, HEIGHT, WIDTH, 4, seed=seed) for seed in range(count)]
    planes = [[picture[..., channels] for channels in order] for picture in pictures]
    video = read_video(write_planes(tmp_path / f"a.{suffix}", codec, pix_fmt, planes, full=True))
    frames = list(video.frames())
    for frame, picture in zip(frames, pictures, strict=True):
        assert (wide(frame) == picture[..., :3]).all()
    (piece,) = video.pieces()
    assert torch.equal(piece.view(torch.int16)[0, :, 0], frames[0].view(torch.int16).movedim(2, 0))


@pytest.mark.parametrize(
    ("pix_fmt", "matrix", "full"),
    [
        ("yuv444p10le", 1, False),
        ("yuv444p10le", 9, False),
        ("yuv444p10le", 6, True),
        ("yuv444p10le", 2, False),  # no tag: FFmpeg assumes BT.601
        ("yuva444p12le", 1, True),
        ("yuv444p16le", 1, False),
        ("gray10le", 1, False),
        ("gray10le", 1, True),
    ],
)
def test_yuv_follows_the_formula_over_its_range(tmp_path, pix_fmt, matrix, full):
    bits = int(pix_fmt[-4:-2])
    step = 1 << (bits - 8)
    luma = numbers(bits, 64, 80)
    near = {"low": 108 * step, "high": 148 * step}  # most colors of any luma are in range
    chroma = [numbers(bits, 64, 80, seed=seed, **near) for seed in (1, 2)]
    if pix_fmt.startswith("gray"):
        chroma = [np.full_like(luma, 128 * step)] * 2
    planes = [luma, *chroma, luma][: {"gray": 1, "yuva": 4}.get(pix_fmt[:4], 3)]
    path = write_planes(tmp_path / "a.mkv", "ffv1", pix_fmt, [planes], matrix=matrix, full=full)
    exact = rgb_of(luma, *chroma, bits, matrix, full)
    video = read_video(path)
    assert video.bit_depth == bits
    # In levels of 10 bits: half a level of rounding, and a little for swscale.
    assert np.abs(wide(next(video.frames())) / 65535 - exact).max() * 1023 <= 0.6


@pytest.mark.parametrize(
    ("pix_fmt", "kind"), [("gbrpf32le", "half"), ("gbrapf32le", "float"), ("grayf32le", "half")]
)
def test_exr_gets_the_curve_of_srgb(tmp_path, pix_fmt, kind):
    light = (np.random.default_rng(0).random((HEIGHT, WIDTH, 3)) * 1.2 - 0.1).astype(np.float32)
    light[0, :4] = np.array([0, 0.0031308, 1, np.nan], np.float32)[:, None]
    if kind == "half":
        light = light.astype(np.float16).astype(np.float32)
    order = {"gbrp": [1, 2, 0], "gbra": [1, 2, 0, 0], "gray": [0]}[pix_fmt[:4]]
    path = tmp_path / "a.exr"
    write_planes(path, "exr", pix_fmt, [[light[..., index] for index in order]], {"format": kind})
    shown = light[..., [0, 0, 0] if pix_fmt[:4] == "gray" else [0, 1, 2]]
    if pix_fmt[:4] == "gbra":  # its alpha is the red plane, and colors are stored times alpha
        shown = shown / np.where(light[..., :1] > 0, light[..., :1], 1)
    shown = np.clip(np.nan_to_num(shown.astype(np.float64)), 0, 1)
    curve = np.where(shown <= 0.0031308, 12.92 * shown, 1.055 * shown ** (1 / 2.4) - 0.055)
    video = read_video(path)
    assert video.bit_depth == 16
    assert np.abs(wide(next(video.frames())) - curve * 65535).max() <= 0.6
    small = next(video.frames(dtype=torch.uint8))
    assert np.abs(small.numpy() - curve * 255).max() <= 0.51


def shape_file(path, ratio, gray, degrees=0):
    """Write a gray picture in [0, 1] in 10 bits with a pixel aspect ratio and a rotation."""

    def prepare(stream):
        stream.codec_context.sample_aspect_ratio = ratio
        if degrees:
            stream.set_display_rotation(degrees)

    planes = [64 + gray * 876, *[np.full(gray.shape, 512)] * 2]
    return write_planes(path, "prores_ks", "yuv444p10le", [planes], prepare=prepare)


def waves(height, width):
    """A gray picture in [0, 1], the same at every size."""
    y, x = (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width
    return 0.5 + 0.2 * np.sin(2 * np.pi * x) + 0.2 * np.cos(2 * np.pi * y)[:, None]


@pytest.mark.parametrize(
    ("ratio", "height", "width", "shown", "degrees"),
    [
        (Fraction(8, 9), 48, 72, 64, 0),  # NTSC, 4:3
        (Fraction(32, 27), 31, 51, 60, -90),  # NTSC, 16:9; 60.44
        (Fraction(32, 27), 48, 72, 85, 180),  # 85.33
    ],
)
def test_the_width_is_scaled_before_the_rotation(
    tmp_path, caplog, ratio, height, width, shown, degrees
):
    if degrees and not hasattr(av.VideoStream, "set_display_rotation"):
        pytest.skip("PyAV before 17 writes no rotation")
    path = shape_file(tmp_path / "a.mov", ratio, waves(height, width), degrees)
    with caplog.at_level(logging.INFO):
        video = read_video(path)
    assert caplog.text.count("its width is scaled") == 1
    assert f"pixels of {ratio.numerator}:{ratio.denominator}" in caplog.text
    own = (height, shown)[:: -1 if degrees % 180 else 1]
    assert (video.height, video.width) == own
    # Only cropped; larger; and one side smaller, the other larger than stored.
    for size in ((1, 1), (0.5, 0.5), (1, 0.75), (2, 1), (0.8, 1.1)):
        kept = tuple(round(part * side) for part, side in zip(size, own, strict=True))
        (piece,) = video.pieces(size=None if kept == own else kept)
        assert piece.shape[3:] == kept
        scale = max(part / side for part, side in zip(kept, own, strict=True))
        whole = np.rot90(waves(round(height * scale), round(shown * scale)), degrees // 90)
        top, left = ((full - part) // 2 for full, part in zip(whole.shape, kept, strict=True))
        exact = whole[top : top + kept[0], left : left + kept[1]]
        # Resampling of a wave of 40 pixels or more, and the edge.
        error = np.abs(piece[0, 1, 0].numpy() / 65535 - exact).max()
        assert error <= (0.01 if kept == own else 0.015)


@pytest.mark.parametrize("ratio", [Fraction(1), Fraction(40), Fraction(1, 30)])
def test_square_and_absurd_ratios_change_no_pixel(tmp_path, caplog, ratio):
    def prepare(stream):
        stream.codec_context.sample_aspect_ratio = ratio

    frames = moving_clip(2)
    plain = read_video(write_with(tmp_path / "plain.mp4", frames, "mp4"))
    with caplog.at_level(logging.DEBUG, logger="fast_video_vae"):
        video = read_video(write_with(tmp_path / "ratio.mp4", frames, "mp4", prepare=prepare))
    for size in (None, (24, 40)):
        assert torch.equal(pieces_of(video, size=size), pieces_of(plain, size=size))
    assert caplog.text.count("is ignored") == (ratio != 1)
    assert "its width is scaled" not in caplog.text


def test_a_picture_that_grows_too_large_is_refused(tmp_path, monkeypatch):
    path = shape_file(tmp_path / "a.mov", Fraction(10), waves(16, 32))
    monkeypatch.setattr(video_reader, "MOST_PIXELS", 16 * 320 - 1)
    with refused(r"a\.mov is 320x16 in square pixels; expected at most"):
        read_video(path)


GOLDEN = Path(__file__).with_name("golden")
EXPECTED = load_file(GOLDEN / "frames.safetensors")
WAYS = {"own": {}, "at_16": {"fps": Fraction(16)}, "range": {"start": 0.1, "duration": 0.2}}


@pytest.mark.parametrize("key", EXPECTED)
def test_a_clip_keeps_its_frames_times_and_colors(key):
    (name, way), expected = key.split(), EXPECTED[key]
    video, step = read_video(GOLDEN / name), 2 if way == "own" else 4
    found = pieces_of(video, **WAYS[way])[:, ::step, ::step]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if av.library_versions["libswscale"] < (9, 5) and name in ("interlaced.mkv", "rotated.mp4"):
        return  # before FFmpeg 8.1 swscale interpolates the chroma of both in another way
    level = 257 * 255 / ((1 << video.bit_depth) - 1) if video.bit_depth > 8 else 1
    assert (found.double() - expected.double()).abs().max() <= level
