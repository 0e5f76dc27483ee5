"""When the frames of a video are: a stretch of it, and a constant frame rate.

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
# How far, in frames, a frame may be from its turn and have it yet. Less than 1, so that a missing
# frame is seen; more than 1/2, so that jitter about the middle neither repeats nor drops.
LEEWAY = Fraction(3, 4)
# Frames that follow each other faster, in frames, than any jitter explains are there by haste, and
# have no right to a turn each.
HASTE = Fraction(1, 3)
# Times that go back by more than this many seconds, or ahead by more than `AHEAD`, are those of a
# clock that was set anew, as where recordings were joined; no pause.
BACK = Fraction(1)
AHEAD = Fraction(3600)


class TimedFrame(NamedTuple):
    """A frame, when it is shown, and until when, in seconds."""

    time: Fraction
    end: Fraction
    frame: av.VideoFrame


def timed(
    frames: Iterable[av.VideoFrame],
    origin: Fraction,
    fps: Fraction,
    ahead: Fraction = AHEAD,
) -> Iterator[TimedFrame]:
    """Give frames their times.

    Args:
        frames: Frames in the order in which they are shown.
        origin: Time of the file's first frame, by the file's own clock.
        fps: Frames per second, for frames that do not tell their time or how long they last.
        ahead: The longest pause in seconds; after a longer one the clock was set anew.

    Yields:
        The frames; times never go back.
    """
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
    """The frames whose time is at `start` or later, and before `end`; None: all that follow.

    Stretches that meet share no frame and lose none. But where nothing comes for more than `pause`
    seconds from `start` on, the frame that is shown meanwhile comes first, with its own time.
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
    last: TimedFrame | None = None
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


def in_step(
    frames: Iterable[TimedFrame],
    fps: Fraction,
    start: Fraction = Fraction(0),
    end: Fraction | None = None,
    *,
    ends: bool = True,
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Show frames at the constant rate that they have, and keep their timing where they have not.

    Frames come in turn, each once, as long as they are less than `LEEWAY` from their turn: jitter
    and the rounding of files change nothing. After a pause the frame before it is repeated, and of
    frames that come too fast the earlier ones are left out, so that no frame is shown `LEEWAY`
    frames too early or late.

    Args:
        frames: The frames of a stretch; one behind it, if it comes, tells how long the last lasts.
        fps: Frames per second.
        start: The first moment; the first frame may be earlier or later.
        end: The end of the stretch; None: that of the last frame.
        ends: The last frame of all lasts as long as it says; else it is shown once.

    Yields:
        Frames, and how often each is shown in a row; one at least in all.
    """
    last: TimedFrame | None = None
    origin, turn = start, 0
    # Whether every frame lasted as long as it says. In MP4 it is the time to the one decoded next,
    # which is another one where frames are decoded out of turn.
    lasts = ends

    def turn_at(time: Fraction, since: Fraction) -> int:
        """Whose turn it is at a moment, where the last frame came at `since`."""
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
