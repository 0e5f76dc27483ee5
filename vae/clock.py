"""When the frames of a video are: a stretch of it, and another frame rate.

Times are fractions of a second and exact, counted from the first frame of the file.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import av

# Matroska and WebM round times to a millisecond, so a frame may lie half of one off; a little more
# takes up what a decimal of the user leaves out.
SLACK = Fraction(6, 10_000)


class Timed(NamedTuple):
    """A frame, when it is shown, and until when, in seconds."""

    time: Fraction
    end: Fraction
    frame: av.VideoFrame


def timed(
    frames: Iterable[av.VideoFrame], origin: Fraction, fps: Fraction, begin: Fraction = Fraction(0)
) -> Iterator[Timed]:
    """Give frames their times.

    Args:
        frames: Frames in the order in which they are shown.
        origin: Time of the file's first frame, by the file's own clock.
        fps: Frames per second, for frames that do not tell their time or how long they last.
        begin: Time of the first of `frames`, where it does not tell its own.

    Yields:
        The frames; times never go back.
    """
    end = last = begin
    for frame in frames:
        time, base = end, frame.time_base
        if frame.pts is not None and base:
            time = max(frame.pts * base - origin, last)
        end = time + (frame.duration * base if frame.duration and base else 1 / fps)
        last = time
        yield Timed(time, end, frame)


def between(frames: Iterable[Timed], start: Fraction, end: Fraction | None) -> Iterator[Timed]:
    """The frames whose time is at `start` or later, and before `end`; None: all that follow.

    Stretches that meet share no frame and lose none.
    """
    for item in frames:
        if end is not None and item.time >= end - SLACK:
            return
        if item.time >= start - SLACK:
            yield item


def at_rate(
    frames: Iterable[Timed],
    fps: Fraction,
    start: Fraction = Fraction(0),
    end: Fraction | None = None,
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Show frames at another rate, by repeating some and leaving out others.

    At `start + n / fps` the frame is the one whose time is nearest, and of two that are equally
    near, to what files round, the earlier one. Frames outside of `start` and `end` are not shown.

    Args:
        frames: The frames from `start` on.
        fps: Frames per second of what is wanted.
        start: The first moment.
        end: The end of the last one; None: the end of the last frame.

    Yields:
        Frames, and how often each is shown in a row. Together they are one for every `n / fps`
        before the end, and one at least.
    """
    last: Timed | None = None
    shown = 0

    def due(until: Fraction) -> int:
        """How many are to be shown before a moment, beside those that were."""
        until = until if end is None else min(until, end)
        return max(frames_within(until - start, fps), 1) - shown

    for item in frames:
        if last is not None:
            # Where two are equally near, the rounding of the file must not choose.
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


def frames_within(seconds: Fraction, fps: Fraction) -> int:
    """How many frames at a constant rate begin in so many seconds."""
    return max(0, math.ceil((seconds - SLACK) * fps))


def checked_rate(fps: Fraction | float) -> Fraction:
    """A frame rate as a fraction that files can hold: numerator and denominator are 32-bit.

    Raises:
        ValueError: It is not more than 0 and less than 10000.
    """
    rate = Fraction(fps).limit_denominator(100_000) if 0 < fps < 10_000 else Fraction(0)
    if not rate:
        raise ValueError(f"fps is {fps}; expected more than 0 and less than 10000")
    return rate
