"""Videos with a varying rate keep their timing, those with a constant rate every frame."""

import itertools
import logging
import math
import random
from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import av, numbered_clip, numbers, pieces_of, write_with
from fast_video_vae.vae.media import read_video
from fast_video_vae.vae.media.cadence import cadence
from fast_video_vae.vae.media.timestamps import TimedFrame, paced, timed

NTSC_FILM = Fraction(24000, 1001)


def even(count, fps, begin=0):
    """Return frame times in ms, rounded as Matroska rounds them."""
    return [begin + round(1000 * index / fps) for index in range(count)]


def phone(count):
    """Return frame times in ms, each 1/30.5 to 1/29.5 s after the one before."""
    rng = random.Random(0)
    apart = [1000 / rng.uniform(29.5, 30.5) for _ in range(count - 1)]
    return [round(time) for time in itertools.accumulate([0, *apart])]


def irregular(path, times):
    def clear(stream):
        stream.bit_rate = 4_000_000  # so the grays are distinct

    container = {".mkv": "matroska"}.get(path.suffix, "mp4")
    clip = numbered_clip(len(times), 16, 16)
    return write_with(path, clip, container, times=times, prepare=clear)


def shown(video, **options):
    return numbers(pieces_of(video, **options))


def moments(found, fps):
    """Return the time in ms at which each number is first shown."""
    first = {}
    for tick, number in enumerate(found):
        first.setdefault(number, 1000 * tick / float(fps))
    return first


VARYING = {
    # frame times in ms, the rate (None: any), and the duration of the last frame in ms
    "nine frames at 4.5 per second": (even(9, Fraction(9, 2)), Fraction(9, 2), 222),
    "one gap": (even(20, 25) + even(20, 25, 1500), 25, 40),
    "a frame is missing": ([time for time in even(30, 25) if time != 400], 25, 40),
    "slides of different lengths": ([0, 3000, 8000, 10_000, 14_000], None, None),
    "slow, then fast": (even(20, 15) + even(60, 30, 1400), 30, 33),
}


# Matroska, and WebM with it, rounds times to 1 ms; MP4 has an index.
@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, "mkv") for name in VARYING), ("one gap", "mp4")]
)
def test_a_varying_rate_keeps_its_timing(tmp_path, caplog, name, suffix):
    times, fps, last = VARYING[name]
    video = read_video(irregular(tmp_path / f"a.{suffix}", times))
    assert fps is None or abs(video.fps / fps - 1) < 0.002  # times in ms
    tick = 1000 / video.fps
    with caplog.at_level(logging.INFO):
        found = shown(video)
    whole = times[-1] + (last or tick)
    assert abs(len(found) * tick - whole) <= tick * 1.01
    for number, moment in moments(found, video.fps).items():
        assert abs(moment - times[number]) <= 0.75 * tick + 1
    assert abs(video.estimated_frames - len(found)) <= max(2, len(found) // 4)
    said = [each for each in caplog.messages if "it is read at" in each]
    assert len(said) == 1
    assert f"a.{suffix} has a varying frame rate" in said[0]
    assert f"read at {float(video.fps):.5g} frames per second" in said[0]


@pytest.mark.parametrize(
    ("times", "fps", "suffix"),
    [
        (even(120, NTSC_FILM), NTSC_FILM, "mkv"),
        (even(60, Fraction(30000, 1001)), None, "mkv"),  # too short to distinguish it from 30
        (phone(90), None, "mp4"),
        (even(300, 10), 10, "mkv"),  # more frames than are sampled
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
        found = shown(video, fps=fps)
        for tick in range(math.ceil(3 * fps)):
            away = [abs(Fraction(time, 1000) - tick / fps) for time in times]
            # Distances within the rounding of files are equal: the earlier frame is shown.
            first = next(
                n for n, each in enumerate(away) if each < min(away) + Fraction(12, 10_000)
            )
            assert found[tick] == first, (fps, tick)
    # The frame on screen, unless the next one starts soon.
    for start, number in ((1.0, 3), (1.98, 4), (2.0, 4), (2.004, 5)):
        assert shown(video, start=start, fps=video.fps)[0] == number


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


def frame_at(milliseconds):
    frame = av.VideoFrame(16, 16, "gray")
    frame.pts, frame.time_base = milliseconds, Fraction(1, 1000)
    return frame


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
    found = timed([frame_at(time) for time in times], Fraction(0), Fraction(25))
    assert [round(1000 * item.time) for item in found] == expected


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
