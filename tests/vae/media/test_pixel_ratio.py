"""Files with pixels that are not square are read as they are shown."""

import logging
from fractions import Fraction

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, moving_clip, pieces_of, write_planes, write_with
from fast_video_vae.vae.media import read_video, video_reader

ROTATES = hasattr(av.VideoStream, "set_display_rotation")


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
    if degrees and not ROTATES:
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
