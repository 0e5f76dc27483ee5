"""Frame times: ranges, pauses and other rates, compared with the nearest input frames."""

import itertools
import math
from fractions import Fraction

import pytest

from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media.timestamps import (
    LEEWAY,
    SLACK,
    TimedFrame,
    at_rate,
    between,
    checked_rate,
    frames_within,
    in_step,
    timed,
)

NTSC = Fraction(30000, 1001)
RATES = [Fraction(5), Fraction(12), Fraction(16), NTSC, Fraction(24), Fraction(60), Fraction(1, 2)]


def constant(count, fps, start=Fraction(0), digits=None):
    """Return frames at a constant rate with their index as content.

    `digits` rounds the times to decimals of a second, as Matroska does with 3.
    """
    times = [start + index / fps for index in range(count + 1)]
    if digits:
        times = [Fraction(round(time, digits)) for time in times]
    return ending(times)


def ending(times):
    """Return frames with their index as content; each ends at the next time."""
    return [TimedFrame(a, b, index) for index, (a, b) in enumerate(itertools.pairwise(times))]


def shown(items, fps, end=None, by=at_rate):
    return [frame for frame, count in by(items, fps, items[0].time, end) for _ in range(count)]


def nearest(items, fps):
    """Return the nearest frame for each output time before the end; of two, the earlier.

    Distances count as equal if they differ by less than the rounding of times in files.
    """
    origin, end = items[0].time, items[-1].end
    found, count = [], 0
    while not count or origin + count / fps < end - SLACK:
        moment = origin + count / fps
        away = [abs(item.time - moment) for item in items]
        least = min(away)
        found.append(
            next(x.frame for x, d in zip(items, away, strict=True) if d < least + SLACK * 2)
        )
        count += 1
    return found


@pytest.mark.parametrize("fps", RATES)
def test_every_output_frame_is_the_nearest_input_frame(fps):
    varying = ending(Fraction(time, 100) for time in [0, 10, 15, 90, 200, 201, 300])
    pairs = itertools.product((1, 2, 20), RATES)
    for items in [varying, *(constant(*pair, Fraction(7, 3)) for pair in pairs)]:
        assert shown(items, fps) == nearest(items, fps)


@pytest.mark.parametrize(
    ("source", "fps"),
    [(24, 48), (12, 24), (30, 60), (24, 12), (60, 15), *zip(RATES, RATES, strict=True)],
)
def test_times_rounded_to_milliseconds_give_the_same_frames(source, fps):
    exact = constant(400, Fraction(source))
    rounded = constant(400, Fraction(source), digits=3)
    assert shown(rounded, Fraction(fps)) == shown(exact, Fraction(fps))


def test_a_range_has_the_frames_of_its_duration():
    for source in RATES[:-1]:
        for fps in RATES[:-1]:
            frames = shown(constant(100, source), fps, Fraction(1))
            assert len(frames) == frames_within(Fraction(1), fps) == math.ceil(fps)
            assert frames[-1] < source  # no later frame


@pytest.mark.parametrize("digits", [None, 3])
@pytest.mark.parametrize("cut", [Fraction(1, 24), Fraction(5, 24), Fraction(1), Fraction("2.0417")])
def test_adjacent_ranges_share_and_lose_no_frame(digits, cut):
    items = constant(120, Fraction(24), digits=digits)
    first = list(between(items, Fraction(0), cut))
    second = list(between(items, cut, None))
    assert first + second == items
    assert len(first) == round(cut * 24)


def test_a_rate_outside_the_range_of_files_is_refused():
    assert checked_rate(29.97) == Fraction(2997, 100)
    for fps in (0, -1.5, 10_000, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected more than 0 and less than 10000"):
            checked_rate(fps)


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("digits", [None, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 400])
def test_constant_frames_are_neither_repeated_nor_dropped(fps, digits, count):
    items = constant(count, fps, Fraction(7, 3), digits)
    assert shown(items, fps, by=in_step) == list(range(count))
    # A rate error that adds up to half of `LEEWAY` over all frames changes nothing.
    assert shown(items, fps * (1 + LEEWAY / 2 / count), by=in_step) == list(range(count))


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("source", RATES)
def test_no_frame_is_shown_too_early_or_late(source, fps):
    items = constant(60, source, Fraction(7, 3))
    found = shown(items, fps, by=in_step)
    for tick, number in enumerate(found):
        if tick == 0 or found[tick - 1] != number:
            moment = items[0].time + tick / fps
            assert abs(moment - items[number].time) * fps <= LEEWAY
    assert found == sorted(found)
    # The output lasts as long as the input, also at a rate far below that of the input.
    assert abs(len(found) / fps - 60 / source) <= Fraction(3, 2) / fps


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
    items = ending(map(Fraction, times))
    assert shown(items, Fraction(fps), end, in_step) == expected


def frame_at(milliseconds):
    frame = av.VideoFrame(16, 16, "gray")
    frame.pts, frame.time_base = milliseconds, Fraction(1, 1000)
    return frame


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0, 40, 80], [0, 40, 80]),
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


def test_a_frame_shown_during_a_pause_is_in_the_range():
    items = [TimedFrame(Fraction(t), Fraction(t + 1), t) for t in (0, 1, 5, 6)]

    def found(start, end):
        return [item.frame for item in between(items, Fraction(start), end, Fraction(1))]

    assert found(2, 4) == [1]
    assert found(2, 6) == [1, 5]
    assert found(4, 6) == [5]  # the next frame starts within 1 s
    assert found(1, 6) == [1, 5]
    assert found(8, None) == []
    assert list(between(items, Fraction(2), Fraction(4))) == []
