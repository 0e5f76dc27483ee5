"""At which constant rate a video is read: its own where it has one, else the one that fits best.

What a file announces may be wrong: Matroska names a default that its times need not keep, and MP4
an average that no frame keeps. So the times of frames decide, as far as they can be had without
reading the whole file.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from av.packet import Packet
from av.video.stream import VideoStream

from .av_input import FAULTS

# Packets whose times are looked at, and the bytes that they may have: 8 s of a usual video, enough
# to tell 24 frames per second from 23.976 where times are rounded to 1 ms.
SAMPLE, SAMPLE_BYTES = 256, 2**24
# The most frames that a packet may be ahead of its turn: the limit of H.264 and H.265.
REORDERED = 16
# The most frames of an index that are looked at: an hour of a usual video, in 0.1 s.
INDEXED = 100_000
# How far, in frames, times may lie apart about even ones. Jitter of less than a third of a frame to
# both sides, such as 24 per second on a screen of 60, is constant; one frame that is missing is 1.
JITTER = 0.6
# A rate that fits better by less than this, in frames over the whole sample, is not preferred.
BETTER = 0.1
# Rates that files are made with.
USUAL = tuple(
    rate
    for whole in (12, 15, 16, 24, 25, 30, 48, 50, 60, 90, 100, 120)
    for rate in (Fraction(whole), Fraction(whole * 1000, 1001))
)
# How far a measured rate is from the usual one that it is taken for.
NEAR = Fraction(1, 100)
# The highest rate for frames that come irregularly: more would be repetitions alone.
HIGHEST = Fraction(120)
# What a rate may be: less than `LIMIT`, as `checked_rate` has it, and a frame in an hour or more.
LOWEST, LIMIT = Fraction(1, 3600), 10_000


class PacketTimes:
    """Packets on their way to the decoder, and the times of the first of them."""

    def __init__(self, packets: Iterator[Packet]) -> None:
        self._packets = packets
        self._times: list[float | None] = []
        self._bytes = 0
        self._whole = False

    def __iter__(self) -> Iterator[Packet]:
        for packet in self._packets:
            if packet.size and not packet.is_discard:
                pts, base = packet.pts, packet.time_base
                self._times.append(None if pts is None or base is None else float(pts * base))
                self._bytes += packet.size
            yield packet
        self._whole = True

    def times(self) -> list[float]:
        """When the first frames are shown, in order; none where the file does not tell it of all.

        What was not taken yet is read on, to the limits above.
        """
        try:
            for _ in self:
                if len(self._times) >= SAMPLE or self._bytes >= SAMPLE_BYTES:
                    break
        except FAULTS:
            pass  # damage is for the one to tell who reads up to there
        found = [time for time in self._times if time is not None]
        if len(found) < len(self._times):
            return []
        # Those that are shown before the last ones may come after them.
        return sorted(found) if self._whole else sorted(found)[: max(len(found) - REORDERED, 2)]


def indexed_times(stream: VideoStream) -> list[float]:
    """The times of all frames where the index of the file has them, in the order of decoding.

    Distances are those of the times when frames are shown, or nearly. PyAV before 17 has no index.
    """
    index = getattr(stream, "index_entries", ())
    if not stream.time_base or not stream.frames or len(index) != stream.frames:
        return []
    base = float(stream.time_base)
    return sorted(entry.timestamp * base for entry in itertools.islice(index, INDEXED))


def cadence(times: Sequence[float], announced: Sequence[Fraction]) -> tuple[Fraction | None, bool]:
    """Choose the rate.

    Args:
        times: When frames are shown, in order, in seconds; none where that is not known.
        announced: What the file says of its rate, the most credible first.

    Returns:
        Frames per second, None where nothing is known of them, and whether they are constant.
    """
    known = [rate for rate in announced if 0 < rate < LIMIT]
    if len(times) < 2 or times[-1] <= times[0]:
        return (known[0] if known else None), True
    measured = _kept(1 / _slope(times))
    rates = [*known, *_usual(measured), measured]
    spreads = [_spread(times, float(rate)) for rate in rates]
    most = min(JITTER, min(spreads) + BETTER)
    for rate, spread in zip(rates, spreads, strict=True):
        if spread <= most:
            return rate, True
    dominant = _dominant(times)
    known = [rate for rate in known if is_near(rate, dominant)]
    return [*known, *_usual(dominant), dominant][0], False


def is_near(rate: Fraction, other: Fraction) -> bool:
    """Whether one rate may pass for another."""
    return abs(rate - other) <= NEAR * other


def _slope(times: Sequence[float]) -> float:
    """Seconds from frame to frame, by least squares: a few frames that jitter do not matter."""
    middle = (len(times) - 1) / 2
    apart = sum((index - middle) * (time - times[0]) for index, time in enumerate(times))
    return apart / sum((index - middle) ** 2 for index in range(len(times)))


def _spread(times: Sequence[float], rate: float) -> float:
    """How far, in frames, the times lie apart about those of a constant rate."""
    off = [(time - times[0]) * rate - index for index, time in enumerate(times)]
    return max(off) - min(off)


def _dominant(times: Sequence[float]) -> Fraction:
    """The rate of the shorter distances, so that most frames are kept, whatever pauses are there.

    It is that of the first quartile, because a few frames may lie close together by accident.
    """
    apart = sorted(late - early for early, late in itertools.pairwise(times) if late > early)
    quartile = apart[len(apart) // 4]
    equal = [each for each in apart if abs(each - quartile) <= quartile / 4]
    return min(_kept(len(equal) / sum(equal)), HIGHEST)


def _usual(rate: Fraction) -> list[Fraction]:
    """The usual rates that are near one, the nearest first."""
    near = (each for each in USUAL if is_near(each, rate))
    return sorted(near, key=lambda each: abs(each - rate))


def _kept(rate: float) -> Fraction:
    """A rate with small numbers, in the range that files can hold."""
    return min(max(Fraction(rate).limit_denominator(1001), LOWEST), Fraction(LIMIT - 1))
