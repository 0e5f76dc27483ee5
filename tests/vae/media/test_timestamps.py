"""Frame times: ranges, pauses and other rates, compared with the nearest input frames."""

import itertools
from fractions import Fraction

import pytest

from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media.timestamps import (
    LEEWAY,
    SLACK,
    TimedFrame,
    paced,
    since,
    timed,
)

NTSC = Fraction(30000, 1001)
RATES = [Fraction(5), Fraction(12), Fraction(16), NTSC, Fraction(24), Fraction(60), Fraction(1, 2)]


def constant(count, fps, start):
    """Return frames at a constant rate with their index as content."""
    return ending(start + index / fps for index in range(count + 1))


def ending(times):
    """Return frames with their index as content; each ends at the next time."""
    return [TimedFrame(a, b, index) for index, (a, b) in enumerate(itertools.pairwise(times))]


def shown(items, fps, end=None, **options):
    found = paced(items, fps, items[0].time, end, **options)
    return [frame for frame, count in found for _ in range(count)]


def nearest(items, fps):
    """Return the nearest frame for each output time before the end; of two, the earlier.

    Distances count as equal if they differ by less than the rounding of times in files.
    """
    origin, end = items[0].time, items[-1].end
    found, count = [], 0
    while not count or origin + count / fps < end - SLACK:
        away = [abs(item.time - origin - count / fps) for item in items]
        found.append(next(index for index, d in enumerate(away) if d < min(away) + SLACK * 2))
        count += 1
    return found


def test_every_output_frame_is_the_nearest_input_frame():
    varying = ending(Fraction(time, 100) for time in [0, 10, 15, 90, 200, 201, 300])
    drawn = itertools.product((1, 9), RATES, [Fraction(7, 3)])
    for items in [varying, *itertools.starmap(constant, drawn)]:
        for fps in RATES:
            assert shown(items, fps) == nearest(items, fps)


def test_no_frame_is_shown_too_early_or_late():
    for source, fps in itertools.product(RATES, RATES):
        items = constant(60, source, Fraction(7, 3))
        found = shown(items, fps, steady=True)
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
    assert shown(ending(map(Fraction, times)), Fraction(fps), end, steady=True) == expected


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
    ("start", "expected"),
    [
        (2, [1, 2, 3]),
        (4, [2, 3]),  # the next frame starts within 1 s
        (1, [1, 2, 3]),
        (8, []),
    ],
)
def test_a_range_begins_with_the_frame_on_screen(start, expected):
    items = [TimedFrame(Fraction(t), Fraction(t + 1), i) for i, t in enumerate((0, 1, 5, 6))]
    found = since(iter(items), Fraction(start), Fraction(1))
    assert [item.frame for item in found] == expected
