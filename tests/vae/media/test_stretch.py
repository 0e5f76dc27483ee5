"""Time ranges of a video, other rates and sizes, and reading from a path or from memory."""

import io
from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import (
    moving_clip,
    numbered_clip,
    numbers,
    pieces_of,
    stacked,
    write,
    write_with,
)
from fast_video_vae.vae.media import read_video

CONTAINERS = [
    ("mp4", "h264", "mp4"),
    ("matroska", "h264", "mkv"),  # declares a duration, but no frame count
    ("mpegts", "h264", "ts"),
    ("avi", "mpeg4", "avi"),
]
RANGES = [
    (0.0, 1.0, range(24)),
    (1.0, 1.0, range(24, 48)),  # begins where the first range ends
    (5 / 24, 1 / 24, range(5, 6)),  # a single frame
    (1.26, 0.5, range(31, 43)),  # between two frames
    (3.0, None, range(72, 100)),
    (99 / 24, 9.0, range(99, 100)),  # past the end
]


def short_groups(stream):
    stream.codec_context.gop_size = 10


@pytest.mark.parametrize(("container", "codec", "suffix"), CONTAINERS)
def test_a_range_is_exact(tmp_path, container, codec, suffix):
    clip = moving_clip(100, 32, 48)
    path = write_with(tmp_path / f"a.{suffix}", clip, container, codec, prepare=short_groups)
    video = read_video(path)
    frames = stacked(video)
    assert (video.estimated_frames, len(frames), video.fps) == (100, 100, 24)
    for start, duration, expected in RANGES:
        found = torch.stack(list(video.frames(start, duration)))
        assert torch.equal(found, frames[expected.start : expected.stop])
        assert video.estimate(start=start, duration=duration) == len(expected)


def test_a_range_skips_earlier_frames(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (300, 48, 64, 3), dtype=torch.uint8, generator=generator)
    whole = write_with(tmp_path / "a.mp4", noise, "mp4", prepare=short_groups).read_bytes()

    class Counted(io.BytesIO):
        taken = 0

        def read(self, count=-1):
            data = super().read(count)
            self.taken += len(data)
            return data

    file = Counted(whole)
    video = read_video(file)
    file.taken = 0
    assert len(list(video.frames(295 / 24))) == 5
    assert file.taken < len(whole) / 4


def test_a_video_that_begins_late_counts_from_its_first_frame(tmp_path):
    times = [10_000 + round(1000 * index / 24) for index in range(48)]
    for container in ("mp4", "matroska"):
        video = read_video(write_with(tmp_path / "late", numbered_clip(48), container, times=times))
        assert video.estimated_frames == len(list(video.frames())) == 48
        found = list(video.frames(1.0, 0.25))
        assert numbers(torch.stack(found)) == [24, 25, 26, 27, 28, 29]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return read_video(write(tmp_path_factory.mktemp("numbered") / "a.mp4", numbered_clip(24)))


@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (24, list(range(24))),
        (12, list(range(0, 24, 2))),
        (48, [number for number in range(24) for _ in range(2)]),
        (16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]),
    ],
)
def test_another_rate_repeats_or_drops_frames(numbered, fps, expected):
    assert numbers(pieces_of(numbered, fps=Fraction(fps))) == expected
    assert numbered.estimate(fps=Fraction(fps)) == len(expected)


def test_a_frame_limit_ends_reading(numbered):
    assert [piece.shape[2] for piece in numbered.pieces(limit=6)] == [4, 2]
    assert numbers(pieces_of(numbered, limit=3, fps=Fraction(8), start=0.5)) == [12, 15, 18]
    assert numbered.estimate(limit=6) == 6


def test_a_file_in_memory_reads_like_a_file_on_disk(tmp_path):
    path = write(tmp_path / "a.mp4", moving_clip(30))
    file = io.BytesIO(path.read_bytes())
    file.read(100)  # its position must not matter
    video, expected = read_video(file), read_video(path)
    assert (video.height, video.width, video.fps, video.estimated_frames) == (48, 64, 24, 30)
    assert torch.equal(stacked(video), stacked(expected))
    assert torch.equal(stacked(video), stacked(expected))
    # Two readers at once, each with its own position.
    for first, second in zip(video.frames(), video.frames(0.5), strict=False):
        assert not torch.equal(first, second)
    assert len(list(video.frames(0.5))) == 18
    assert not file.closed
    with path.open("rb") as opened:
        assert len(list(read_video(opened).frames())) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1.0}, "start is -1.0 s; expected 0 or more"),
        ({"start": float("nan")}, "start is nan s"),
        ({"start": 60.0}, r"a\.mp4 lasts 1\.00 s; start is 60\.0 s"),
        ({"duration": 0.0}, "duration is 0.0 s; expected more than 0"),
        ({"fps": 0}, "fps is 0; expected more than 0 and less than 10000"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": 10_000}, "fps is 10000"),
        ({"limit": 0}, "limited to 0; expected at least 1"),
        ({"frames": 0}, "frames are 0"),
        ({"multiple": 49}, r"a\.mp4 is 64x48; expected at least 49x49"),
        ({"size": (4, 4), "multiple": 8}, r"a\.mp4 is 64x48, requested as 4x4; expected"),
    ],
)
def test_an_impossible_range_is_an_error_before_any_work(numbered, options, message):
    with pytest.raises(ValueError, match=message):
        numbered.pieces(**options)


def test_a_range_after_the_last_frame_is_an_error(numbered):
    with pytest.raises(ValueError, match=r"a\.mp4 has no frame at 1\.1 s or later"):
        next(numbered.pieces(start=1.1))
