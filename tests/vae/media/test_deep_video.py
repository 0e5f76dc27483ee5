"""Reading files of more than 8 bits: exact RGB, the formula of BT.709, rotation, EXR."""

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import WEIGHTS, av, write_planes
from fast_video_vae.vae.media import read_video

HEIGHT, WIDTH = 32, 48
# The error of YUV in levels of 10 bits: half a level of rounding, and a little for swscale.
YUV_ERROR = 0.6


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
    ("suffix", "codec", "pix_fmt", "bits"),
    [
        ("mkv", "ffv1", "gbrp16le", 16),
        ("mkv", "ffv1", "gbrp12le", 12),
        ("mkv", "ffv1", "gray10le", 10),
        ("png", "png", "rgba64be", 16),  # transparent pixels have colors too
    ],
)
def test_lossless_rgb_is_the_nearest_number_of_16_bits(tmp_path, suffix, codec, pix_fmt, bits):
    pictures = [numbers(bits, HEIGHT, WIDTH, 4, seed=seed) for seed in range(2)]
    order = {"gbr": [[1], [2], [0]], "rgb": [[0, 1, 2]], "gra": [[0]]}[pix_fmt[:3]]
    order = [[0, 1, 2, 3]] if "rgba" in pix_fmt else order
    shown = [0, 0, 0] if pix_fmt[:3] == "gra" else [0, 1, 2]
    planes = [[picture[..., channels] for channels in order] for picture in pictures]
    planes = planes[:1] if suffix == "png" else planes
    video = read_video(write_planes(tmp_path / f"a.{suffix}", codec, pix_fmt, planes, full=True))
    assert video.bit_depth == bits
    frames = list(video.frames())
    assert len(frames) == len(planes)
    for frame, picture in zip(frames, pictures, strict=False):
        exact = picture[..., shown] * 65535 / ((1 << bits) - 1)
        error = np.abs(wide(frame) - exact).max()
        assert error == 0 if bits == 16 else error < 1
    (piece,) = video.pieces()
    assert torch.equal(piece.view(torch.int16)[0, :, 0], frames[0].view(torch.int16).movedim(2, 0))


@pytest.mark.parametrize(
    ("pix_fmt", "matrix", "full"),
    [
        ("yuv444p10le", 1, False),
        ("yuv444p10le", 9, False),
        ("yuv444p10le", 6, True),
        ("yuva444p12le", 1, True),
        ("yuv444p16le", 1, False),
        ("gray10le", 1, False),
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
    found = wide(next(read_video(path).frames())) / 65535
    assert np.abs(found - exact).max() * 1023 <= YUV_ERROR


@pytest.mark.parametrize(
    ("pix_fmt", "slack"), [("gbrp16le", 4), ("yuv444p10le", 64), ("gray10le", 4)]
)
def test_a_resize_keeps_black_and_white(tmp_path, pix_fmt, slack):
    most = 1023 if "10" in pix_fmt else 65535
    black, white = (64, 940) if "yuv" in pix_fmt else (0, most)
    picture = np.full((HEIGHT, WIDTH), black)
    picture[:, WIDTH // 2 :] = white
    planes = {"gray": [picture], "yuv4": [picture, *[np.full_like(picture, 512)] * 2]}
    planes = planes.get(pix_fmt[:4], [picture] * 3)
    video = read_video(write_planes(tmp_path / "a.mkv", "ffv1", pix_fmt, [planes]))
    for size in ((16, 24), (48, 80)):
        (piece,) = video.pieces(size=size)
        found = wide(piece[0, :, 0])
        assert found[:, :, 0].max() <= slack
        assert found[:, :, -1].min() >= 65535 - slack


def test_8_bits_can_be_requested(tmp_path):
    planes = [numbers(10, HEIGHT, WIDTH, seed=seed) for seed in range(3)]
    video = read_video(write_planes(tmp_path / "a.mkv", "ffv1", "gbrp10le", [planes]))
    deep, small = (next(video.frames(dtype=dtype)) for dtype in (None, torch.uint8))
    assert small.dtype == torch.uint8
    assert np.abs(wide(deep) / 257 - small.numpy()).max() < 1.5  # swscale dithers
    (piece,) = video.pieces(dtype=torch.uint8)
    assert torch.equal(piece[0, :, 0].permute(1, 2, 0), small)
    for read in (video.frames, video.pieces):
        with refused("dtype is torch.float32; expected torch.uint8, or None"):
            list(read(dtype=torch.float32))


def test_a_stream_that_changes_to_8_bits_keeps_its_dtype(tmp_path):
    picture = numbers(8, HEIGHT, WIDTH, 3)
    deep = write_planes(tmp_path / "deep.png", "png", "rgb48be", [[picture * 257]])
    small = av.VideoFrame.from_ndarray(picture.astype(np.uint8), format="rgb24")
    small.save(str(tmp_path / "small.png"))
    joined = tmp_path / "a.png"  # read as one stream of two pictures
    joined.write_bytes(deep.read_bytes() + (tmp_path / "small.png").read_bytes())
    frames = list(read_video(joined).frames())
    assert len(frames) == 2
    for frame in frames:
        assert np.array_equal(wide(frame), picture * 257.0)


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
