"""Times of frames: varying and constant rates, other rates, ranges, and files in memory."""

import io
import itertools
import logging
import math
import random
import sys
from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import (
    av,
    moving_clip,
    numbered_clip,
    numbers,
    pieces_of,
    stacked,
    write,
    write_with,
)
from fast_video_vae.vae.media import read_video
from fast_video_vae.vae.media.cadence import cadence
from fast_video_vae.vae.media.timestamps import TimedFrame, paced, timed

NTSC_FILM = Fraction(24000, 1001)


def even(count, fps, begin=0):
    """Return frame times in ms, rounded as Matroska rounds them."""
    return [begin + round(1000 * index / fps) for index in range(count)]


def irregular(path, times):
    def clear(stream):
        stream.bit_rate = 4_000_000  # so the grays are distinct

    container = {".mkv": "matroska"}.get(path.suffix, "mp4")
    clip = numbered_clip(len(times), 16, 16)
    return write_with(path, clip, container, times=times, prepare=clear)


APART = random.Random(0)
PHONE = itertools.accumulate([0, *(1000 / APART.uniform(29.5, 30.5) for _ in range(89))])


GAP = even(20, 25) + even(20, 25, 1500)


# Frame times, the rate, the last frame's duration. Matroska rounds to 1 ms; MP4 has an index.
@pytest.mark.parametrize(
    ("times", "fps", "last", "suffix"),
    [
        *((GAP, 25, 40, suffix) for suffix in ("mkv", "mp4")),
        ([time for time in even(30, 25) if time != 400], 25, 40, "mkv"),  # a frame is missing
        (even(20, 15) + even(60, 30, 1400), 30, 33, "mkv"),  # slow, then fast
    ],
)
def test_a_varying_rate_keeps_its_timing(tmp_path, caplog, times, fps, last, suffix):
    video = read_video(irregular(tmp_path / f"a.{suffix}", times))
    assert abs(video.fps / fps - 1) < 0.002  # times in ms
    tick = 1000 / video.fps
    with caplog.at_level(logging.INFO):
        found = numbers(pieces_of(video))
    assert abs(len(found) * tick - times[-1] - last) <= tick * 1.01
    for number in {*found}:
        assert abs(found.index(number) * tick - times[number]) <= 0.75 * tick + 1
    assert abs(video.estimated_frames - len(found)) <= max(2, len(found) // 4)
    (said,) = (each for each in caplog.messages if "it is read at" in each)
    assert f"a.{suffix} has a varying frame rate" in said
    assert f"read at {float(video.fps):.5g} frames per second" in said


@pytest.mark.parametrize(
    ("times", "fps", "suffix"),
    [
        (even(120, NTSC_FILM), NTSC_FILM, "mkv"),
        ([*map(round, PHONE)], None, "mp4"),
        # 24 per second on a 60 Hz screen: each frame is shown for two or three refreshes
        ([round(1000 * round(index * 2.5) / 60) for index in range(60)], 24, "mkv"),
    ],
)
def test_jitter_neither_repeats_nor_drops_frames(tmp_path, caplog, times, fps, suffix):
    video = read_video(irregular(tmp_path / f"a.{suffix}", times))
    assert fps is None or abs(video.fps / fps - 1) < 0.0002
    assert not video.varies
    with caplog.at_level(logging.INFO):
        assert torch.equal(torch.stack(list(video.frames())), pieces_of(video))
    assert "it is read at" not in caplog.text or fps != NTSC_FILM  # the files declare 24
    assert abs(len(times) / video.fps - times[-1] / 1000) < 2 / video.fps


def test_another_rate_shows_the_nearest_frame_and_a_range_that_on_screen(tmp_path):
    times = [0, 100, 150, 900, 2000, 2010, 3000]
    video = read_video(irregular(tmp_path / "a.mkv", times))
    for fps in (Fraction(1, 2), Fraction(5), Fraction(16), Fraction(30000, 1001), Fraction(60)):
        found = numbers(pieces_of(video, fps=fps))
        for tick in range(math.ceil(3 * fps)):
            away = [abs(Fraction(time, 1000) - tick / fps) for time in times]
            # Distances within the rounding of files are equal: the earlier frame is shown.
            first = next(
                n for n, each in enumerate(away) if each < min(away) + Fraction(12, 10_000)
            )
            assert found[tick] == first, (fps, tick)
    # The frame on screen, unless the next one starts soon.
    for start, number in ((1.0, 3), (1.98, 4), (2.0, 4), (2.004, 5)):
        assert numbers(pieces_of(video, start=start, fps=video.fps))[0] == number


@pytest.mark.parametrize(
    ("times", "fps", "end", "expected"),
    [
        ([0, 1, 2, 5, 6, 7], 1, None, [0, 1, 2, 2, 2, 3, 4]),  # a pause
        ([0, 1, 2, 9], 1, None, [0, 1, *[2] * 7]),  # the last frame lasts until 9
        ([0, 1, 2, 9], 1, 4, [0, 1, 2, 2]),  # but not past the end
        ([0, 1, 1, 1, 4, 5], 1, None, [0, 1, 2, 3, 4]),  # equal times
        ([0, 0.2, 0.4, 0.6, 3, 4], 1, None, [2, 3, 3, 4]),  # too fast
        ([0, 1.4, 1.7, 3.4, 4], 1, None, [0, 1, 2, 3]),  # jitter
    ],
)
def test_pauses_repeat_frames_and_bursts_drop_them(times, fps, end, expected):
    pairs = enumerate(itertools.pairwise(map(Fraction, times)))
    items = [TimedFrame(begin, until, number) for number, (begin, until) in pairs]
    found = paced(items, Fraction(fps), items[0].time, end, steady=True)
    assert [frame for frame, count in found for _ in range(count)] == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([None, None, None], [0, 40, 80]),
        ([0, 40, 30, 80], [0, 40, 40, 80]),  # damage
        ([0, 40, 5000, 5040], [0, 40, 5000, 5040]),  # a pause
        ([0, 40, 9_000_000, 9_000_040], [0, 40, 80, 120]),  # another clock
        ([5000, 5040, 0, 40], [5000, 5040, 5080, 5120]),  # the clock restarts
    ],
)
def test_a_jump_of_the_clock_is_not_a_pause(times, expected):
    frames = [av.VideoFrame(16, 16, "gray") for _ in times]
    for frame, frame.pts in zip(frames, times, strict=True):
        frame.time_base = Fraction(1, 1000)
    found = timed(frames, Fraction(0), Fraction(25))
    assert [round(1000 * item.time) for item in found] == expected


def test_frames_that_come_after_the_sample_do_not_make_a_rate_vary(tmp_path, monkeypatch):
    def reorder(stream):
        stream.codec_context.options = {"x264-params": "b-adapt=0:bframes=3"}

    path = write_with(tmp_path / "a.mkv", moving_clip(80, 32, 32), "matroska", prepare=reorder)
    for count in range(60, 66):
        monkeypatch.setattr(sys.modules[cadence.__module__], "SAMPLE", count)
        assert not read_video(path).varies


@pytest.mark.parametrize(
    ("times", "announced", "fps", "is_constant"),
    [
        ([], [Fraction(24)], 24, True),  # no times
        ([], [], 25, True),
        ([1.0, 1.0], [Fraction(24)], 24, True),  # no clock
        ([0.0, 0.5], [Fraction(24)], 2, True),
        ([0.0, 1e-6, 2e-6], [], 120, False),  # too fast
        ([0.0, 1e6, 2e6], [], Fraction(1, 3600), False),  # too slow
        ([index / 30 for index in range(99)], [Fraction(-5), Fraction(10**6)], 30, True),
        # The declared rate is used if it fits as well as the measured one.
        ([index / 29.9 for index in range(99)], [Fraction(299, 10)], Fraction(299, 10), True),
    ],
)
def test_a_rate_is_found_from_times(times, announced, fps, is_constant):
    found, constant = cadence(times, announced)
    assert constant is is_constant
    assert found == pytest.approx(fps)


def short_groups(stream):
    stream.codec_context.gop_size = 10


@pytest.mark.parametrize("suffix", ["mp4", "ts"])  # with and without an index
def test_a_range_is_exact(tmp_path, suffix):
    container = {"ts": "mpegts"}.get(suffix, suffix)
    path = tmp_path / f"a.{suffix}"
    video = read_video(write_with(path, moving_clip(100, 32, 48), container, prepare=short_groups))
    frames = stacked(video)
    assert (video.estimated_frames, len(frames), video.fps) == (100, 100, 24)
    for start, duration, first, last in (
        (0.0, 1.0, 0, 24),
        (1.0, 1.0, 24, 48),  # begins where the first range ends
        (5 / 24, 1 / 24, 5, 6),  # a single frame
        (1.26, 0.5, 31, 43),  # between two frames
        (99 / 24, 9.0, 99, 100),  # past the end
    ):
        found = torch.stack(list(video.frames(start, duration)))
        assert torch.equal(found, frames[first:last])
        assert video.estimate(start=start, duration=duration) == last - first


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
    times = even(48, 24, 10_000)
    for container in ("mp4", "matroska"):
        video = read_video(write_with(tmp_path / "late", numbered_clip(48), container, times=times))
        assert video.estimated_frames == len(list(video.frames())) == 48
        found = list(video.frames(1.0, 0.25))
        assert numbers(torch.stack(found)) == [24, 25, 26, 27, 28, 29]


def test_a_file_in_memory_reads_like_a_file_on_disk(tmp_path):
    path = write(tmp_path / "a.mp4", moving_clip(30))
    file = io.BytesIO(path.read_bytes())
    file.read(100)  # its position must not matter
    video, expected = read_video(file), read_video(path)
    assert (video.height, video.width, video.fps, video.estimated_frames) == (48, 64, 24, 30)
    assert torch.equal(stacked(video), stacked(expected))
    # Two readers at once, each with its own position.
    for first, second in zip(video.frames(), video.frames(0.5), strict=False):
        assert not torch.equal(first, second)
    assert len(list(video.frames(0.5))) == 18
    assert not file.closed
    with path.open("rb") as opened:
        assert len(list(read_video(opened).frames())) == 30


def test_other_rates_limits_and_impossible_ranges(tmp_path):
    video = read_video(write(tmp_path / "a.mp4", numbered_clip(24)))
    for fps, expected in (
        (24, [*range(24)]),
        (48, [number for number in range(24) for _ in range(2)]),
        (16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]),
    ):
        assert numbers(pieces_of(video, fps=Fraction(fps))) == expected
        assert video.estimate(fps=Fraction(fps)) == len(expected)
    assert [piece.shape[2] for piece in video.pieces(limit=6)] == [4, 2]
    assert numbers(pieces_of(video, limit=3, fps=Fraction(8), start=0.5)) == [12, 15, 18]
    assert video.estimate(limit=6) == 6
    for options, message in (
        ({"start": -1.0}, "start is -1.0 s; expected 0 or more"),
        ({"start": 60.0}, r"a\.mp4 lasts 1\.00 s; start is 60\.0 s"),
        ({"duration": 0.0}, "duration is 0.0 s; expected more than 0"),
        ({"fps": 0}, "fps is 0; expected more than 0 and less than 10000"),
        ({"fps": 10_000}, "fps is 10000"),
        ({"limit": 0}, "limited to 0; expected at least 1"),
        ({"frames": 0}, "frames are 0"),
        ({"multiple": 49}, r"a\.mp4 is 64x48; expected at least 49x49"),
        ({"dtype": torch.float32}, "dtype is torch.float32; expected torch.uint8, or None"),
        ({"size": (4, 4), "multiple": 8}, r"a\.mp4 is 64x48, requested as 4x4; expected"),
    ):
        with pytest.raises(ValueError, match=message):  # before any work
            video.pieces(**options)
    with pytest.raises(ValueError, match=r"a\.mp4 has no frame at 1\.1 s or later"):
        next(video.pieces(start=1.1))
