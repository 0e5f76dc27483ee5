"""Times of the frames of a video: selection of a range, and conversion to a constant frame rate.

Times are exact fractions of a second from the first frame on. FFmpeg's filter `fps` repeats and
drops frames whose times jitter, so frames are chosen here.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import av

# Matroska and WebM round times to 1 ms, so a frame may be 0.5 ms off; the rest covers a decimal
# that the user rounded.
SLACK = Fraction(6, 10_000)
# Most frames that a frame is off its turn: below 1, so that a missing frame is noticed; above 1/2,
# so that jitter neither repeats nor drops frames.
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
    frames: Iterable[av.VideoFrame], origin: Fraction, fps: Fraction, ahead: Fraction = AHEAD
) -> Iterator[TimedFrame]:
    """Yield frames with times that never decrease; a pause longer than `ahead` resets the clock."""
    end = shift = Fraction(0)
    last: Fraction | None = None
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


def since(frames: Iterator[TimedFrame], start: Fraction, pause: Fraction) -> Iterator[TimedFrame]:
    """Drop the frames before `start`, but not the one on screen if none follows within `pause`."""
    shown: TimedFrame | None = None
    for item in frames:
        if item.time >= start - SLACK:
            if shown and item.time > start + pause:
                yield shown
            yield item
            yield from frames
            return
        shown = item
    if shown and shown.end > start + pause:
        yield shown


def paced(
    frames: Iterable[TimedFrame],
    fps: Fraction,
    start: Fraction,
    end: Fraction | None = None,
    *,
    steady: bool = False,
    lasts: bool = True,
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Convert frames to a constant rate; yield each one shown, and how often in a row.

    At `start + n / fps` the frame nearest in time is shown, the earlier one of two. `steady`, for
    the video's own rate: each frame is shown once while it is less than `LEEWAY` frames from its
    turn; one before a pause is repeated, and of frames that come too fast the earlier ones are
    dropped. `lasts`: the last frame is shown for its duration if all frames lasted as declared,
    else once: in MP4 the duration is the time to the frame decoded next, not the one shown next.
    """
    last: TimedFrame | None = None
    shown = 0

    def turn(time: Fraction, before: Fraction) -> int:
        """Return the output frame at which what follows the frame at `before` appears."""
        if not steady:
            return max(frames_within((time if end is None else min(time, end)) - start, fps), 1)
        place = (time - start) * fps
        if abs(place - shown - 1) <= LEEWAY and (time - before) * fps > HASTE:
            return shown + 1
        return max(round(place), shown)

    for item in frames:
        if last is None:
            last, start = item, max(item.time, start) if steady else start
            continue
        if end is not None and item.time >= end - SLACK:
            last, lasts = last._replace(end=end), True
            break
        if not steady:
            # The rounding of the file must not decide between two equally near frames.
            following = turn((last.time + item.time) / 2 + 2 * SLACK, last.time)
        else:
            # A frame with the time of the one before has no time of its own.
            following = turn(item.time, last.time) if item.time > last.time else shown + 1
            lasts &= abs(last.end - item.time) * fps < LEEWAY / 3
        if following > shown:
            yield last.frame, following - shown
        last, shown = item, following
    if last is None:
        return
    count = turn(last.end if end is None else min(last.end, end), last.time) - shown
    if steady:
        count = max(count, 1) if lasts else 1
    if count > 0:
        yield last.frame, count


def frames_within(seconds: Fraction, fps: Fraction) -> int:
    """Return how many frames at `fps` start within `seconds`."""
    return max(0, math.ceil((seconds - SLACK) * fps))


def checked_rate(fps: Fraction | float) -> Fraction:
    """Return a rate in (0, 10000) as a fraction that files can store, with 32-bit terms."""
    rate = Fraction(fps).limit_denominator(100_000) if 0 < fps < 10_000 else Fraction(0)
    if not rate:
        raise ValueError(f"fps is {fps}; expected more than 0 and less than 10000")
    return rate
