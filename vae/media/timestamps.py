"""Times of the frames of a video: selection of a range, and conversion to a constant frame rate.

Times are exact fractions of a second, counted from the first frame of the file.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import av

# Matroska and WebM round times to 1 ms, so a frame may be 0.5 ms off; the rest covers a decimal
# that the user rounded.
SLACK = Fraction(6, 10_000)
# A frame keeps its turn when it is less than this many frames off. Below 1, so that a missing frame
# is noticed; above 1/2, so that jitter neither repeats nor drops frames.
LEEWAY = Fraction(3, 4)
# Frames closer than this, in frames, are closer than jitter explains, and do not get a turn each.
HASTE = Fraction(1, 3)
# A jump back by more than `BACK` seconds, or ahead by more than `AHEAD`, is a reset of the clock,
# as at the joint of two recordings, and not a pause.
BACK = Fraction(1)
AHEAD = Fraction(3600)


class TimedFrame(NamedTuple):
    """A frame with its start and end time in seconds."""

    time: Fraction
    end: Fraction
    frame: av.VideoFrame


def timed(
    frames: Iterable[av.VideoFrame],
    origin: Fraction,
    fps: Fraction,
    ahead: Fraction = AHEAD,
) -> Iterator[TimedFrame]:
    """Yield frames with times that never decrease; a pause longer than `ahead` resets the clock."""
    end = Fraction(0)
    last: Fraction | None = None
    shift = Fraction(0)
    for frame in frames:
        time, base = end, frame.time_base
        if frame.pts is not None and base:
            time = frame.pts * base - origin + shift
            if last is not None and not last - BACK <= time <= last + ahead:
                shift += end - time
                time = end
            time = max(time, last or Fraction(0))
        end = time + (frame.duration * base if frame.duration and base else 1 / fps)
        last = time
        yield TimedFrame(time, end, frame)


def between(
    frames: Iterable[TimedFrame],
    start: Fraction,
    end: Fraction | None,
    pause: Fraction | None = None,
) -> Iterator[TimedFrame]:
    """Select the frames of a time range.

    Adjacent ranges share no frame and lose none. If no frame starts within `pause` seconds of
    `start`, the frame on screen at `start` comes first, with its own time.
    """
    shown: TimedFrame | None = None
    begun = False
    for item in frames:
        if item.time < start - SLACK:
            shown = item
            continue
        if not begun and shown and pause is not None and item.time > start + pause:
            yield shown
        begun = True
        if end is not None and item.time >= end - SLACK:
            return
        yield item
    if not begun and shown and pause is not None and shown.end > start + pause:
        yield shown


def at_rate(
    frames: Iterable[TimedFrame],
    fps: Fraction,
    start: Fraction = Fraction(0),
    end: Fraction | None = None,
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Convert frames to another rate by repeating and dropping frames.

    At `start + n / fps` the frame nearest in time is shown, and the earlier one of two that are
    equally near within the rounding of files. Yields frames, and how often each is shown in a row.
    """
    last: TimedFrame | None = None
    shown = 0

    def due(until: Fraction) -> int:
        """Return how many frames to show before `until` in addition to those shown."""
        until = until if end is None else min(until, end)
        return max(frames_within(until - start, fps), 1) - shown

    for item in frames:
        if last is not None:
            # The rounding of the file must not decide between two equally near frames.
            over = end is not None and item.time >= end - SLACK
            middle = item.time if over else (last.time + item.time) / 2 + 2 * SLACK
            if (count := due(middle)) > 0:
                yield last.frame, count
                shown += count
            if over:
                return
        last = item
    if last is not None and (count := due(last.end)) > 0:
        yield last.frame, count


def in_step(
    frames: Iterable[TimedFrame],
    fps: Fraction,
    start: Fraction = Fraction(0),
    end: Fraction | None = None,
    *,
    ends: bool = True,
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Convert frames to their constant rate, and keep the timing where they deviate from it.

    Each frame is shown once and in order while it is less than `LEEWAY` frames from its turn, so
    jitter and rounding change nothing. A frame before a pause is repeated, and of frames that come
    too fast the earlier ones are dropped, so that no frame is shown `LEEWAY` frames too early or
    late. A frame after the range ends the last one; `ends`: it is shown for its own duration.
    """
    last: TimedFrame | None = None
    origin, turn = start, 0
    # Whether every frame lasted as declared. In MP4 the duration is the time to the frame decoded
    # next, which is not the one shown next if frames are reordered.
    lasts = ends

    def turn_at(time: Fraction, since: Fraction) -> int:
        """Return the turn at `time` if the last frame came at `since`."""
        place = (time - origin) * fps
        if abs(place - turn - 1) <= LEEWAY and (time - since) * fps > HASTE:
            return turn + 1
        return max(round(place), turn)

    for item in frames:
        if last is None:
            origin = max(item.time, start)
        elif end is not None and item.time >= end - SLACK:
            yield last.frame, max(turn_at(end, last.time) - turn, 1)
            return
        else:
            # A frame at the time of the one before it has no time of its own.
            following = turn_at(item.time, last.time) if item.time > last.time else turn + 1
            if following > turn:
                yield last.frame, following - turn
            turn = following
            lasts &= abs(last.end - item.time) * fps < LEEWAY / 3
        last = item
    if last is not None:
        until = last.end if end is None else min(last.end, end)
        yield last.frame, max(turn_at(until, last.time) - turn, 1) if lasts else 1


def frames_within(seconds: Fraction, fps: Fraction) -> int:
    """Return how many frames at `fps` start within `seconds`."""
    return max(0, math.ceil((seconds - SLACK) * fps))


def checked_rate(fps: Fraction | float) -> Fraction:
    """Return a rate in (0, 10000) as a fraction that files can store, with 32-bit terms."""
    rate = Fraction(fps).limit_denominator(100_000) if 0 < fps < 10_000 else Fraction(0)
    if not rate:
        raise ValueError(f"fps is {fps}; expected more than 0 and less than 10000")
    return rate
