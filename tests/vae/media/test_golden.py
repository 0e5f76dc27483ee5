"""Six small clips of all kinds keep their frames, times and colors from version to version.

`golden/frames.safetensors` has what was read of each, every second or fourth pixel, by a reader
that scaled to 16 bits format by format (2026-11, FFmpeg 8.1).
"""

from fractions import Fraction
from pathlib import Path

import av
import pytest
from safetensors.torch import load_file

from fast_video_vae.tests.videos import pieces_of
from fast_video_vae.vae.media import read_video

GOLDEN = Path(__file__).with_name("golden")
EXPECTED = load_file(GOLDEN / "frames.safetensors")
CLIPS = ("alpha.mov", "anamorphic.mov", "interlaced.mkv", "rotated.mp4", "ten_bits.mkv",
         "varying.mkv")  # fmt: skip
WAYS = {
    "own": (2, {}),
    "at_16": (4, {"fps": Fraction(16)}),
    "range": (4, {"start": 0.1, "duration": 0.2}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_keeps_its_frames_times_and_colors(name, way):
    step, options = WAYS[way]
    video, expected = read_video(GOLDEN / name), EXPECTED[f"{name} {way}"]
    found = pieces_of(video, **options)[:, ::step, ::step]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if av.library_versions["libswscale"] < (9, 5) and name in ("interlaced.mkv", "rotated.mp4"):
        return  # before FFmpeg 8.1 swscale interpolates the chroma of both in another way
    level = 257 * 255 / ((1 << video.bit_depth) - 1) if video.bit_depth > 8 else 1
    assert (found.double() - expected.double()).abs().max() <= level
