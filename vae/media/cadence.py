"""The constant frame rate at which a video is read.

The declared rate may be wrong: the default of a Matroska file, or the average of an MP4 file. So
the times of the frames decide, as far as they are known without reading the whole file.
"""

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from av.packet import Packet
from av.video.stream import VideoStream

from .av_input import FAULTS

# Packets whose times are read, and their bytes at most. 8 s of a typical video distinguish 24 from
# 23.976 frames per second at times rounded to 1 ms.
SAMPLE, SAMPLE_BYTES = 256, 2**24
# Most packets that may precede the one due, by the limit of H.264 and H.265.
REORDERED = 16
# Most index entries that are read: an hour of a typical video, in 0.1 s.
INDEXED = 100_000
# Allowed spread of times around even ones, in frames. Jitter below a third of a frame to both
# sides, such as 24 per second on a 60 Hz screen, counts as constant; a missing frame is 1.
JITTER = 0.6
# A rate with a better fit is preferred only above this difference, in frames over all times.
BETTER = 0.1
# Common frame rates.
USUAL = tuple(
    rate
    for whole in (12, 15, 16, 24, 25, 30, 48, 50, 60, 90, 100, 120)
    for rate in (Fraction(whole), Fraction(whole * 1000, 1001))
)
# Relative difference at which a measured rate is taken for a common one.
NEAR = Fraction(1, 100)
# Highest rate for irregular frames: more would only repeat frames.
HIGHEST = Fraction(120)
# Rate of a file without times and a declared rate.
FALLBACK = Fraction(25)
# Valid rates: at least a frame per hour, and less than `LIMIT`, as in `checked_rate`.
LOWEST, LIMIT = Fraction(1, 3600), 10_000


def sampled(stream: VideoStream, packets: Iterator[Packet]) -> tuple[list[Packet], list[float]]:
    """Take the first packets, and return them with sorted times in seconds; none if one lacks it.

    With an index (PyAV from 17 on reads it) they are the decoding times of all frames.
    """
    taken: list[Packet] = []
    size = 0
    try:
        for packet in packets:
            taken.append(packet)
            size += packet.size
            if len(taken) >= SAMPLE or size >= SAMPLE_BYTES:
                break
    except FAULTS:
        pass  # the reader of that part raises the error
    shown = [packet for packet in taken if packet.size and not packet.is_discard]
    found = sorted(float(each.pts * each.time_base) for each in shown if each.pts is not None)
    if len(found) < len(shown) or not found:
        return taken, []
    index = getattr(stream, "index_entries", ())
    if stream.time_base and len(index) == stream.frames > 0:
        base = float(stream.time_base)
        return taken, sorted(entry.timestamp * base for entry in itertools.islice(index, INDEXED))
    # The last packet of a file is empty. Frames shown before the last ones may come after them.
    return taken, found if not taken[-1].size else found[: max(len(found) - REORDERED, 2)]


def cadence(times: Sequence[float], announced: Sequence[Fraction]) -> tuple[Fraction, bool]:
    """Return the frames per second, and whether the rate is constant.

    `times` are sorted, in seconds; `announced` has the most credible rate first.
    """
    known = [rate for rate in announced if 0 < rate < LIMIT]
    if len(times) < 2 or times[-1] <= times[0]:
        return [*known, FALLBACK][0], True
    # Least squares average out jitter.
    middle = (len(times) - 1) / 2
    apart = sum((index - middle) * (time - times[0]) for index, time in enumerate(times))
    measured = _kept(sum((index - middle) ** 2 for index in range(len(times))) / apart)
    spreads = {}  # of the times around those of a constant rate, in frames
    for rate in (*known, *_usual(measured), measured):
        off = [(time - times[0]) * float(rate) - index for index, time in enumerate(times)]
        spreads[rate] = max(off) - min(off)
    most = min(JITTER, min(spreads.values()) + BETTER)
    for rate, spread in spreads.items():
        if spread <= most:
            return rate, True
    # The rate of the shorter intervals keeps most frames despite pauses: of the first quartile, as
    # a few frames may be close together by accident.
    apart = sorted(late - early for early, late in itertools.pairwise(times) if late > early)
    quartile = apart[len(apart) // 4]
    equal = [each for each in apart if abs(each - quartile) <= quartile / 4]
    dominant = min(_kept(len(equal) / sum(equal)), HIGHEST)
    near = [rate for rate in known if is_near(rate, dominant)]
    return [*near, *_usual(dominant), dominant][0], False


def is_near(rate: Fraction, other: Fraction) -> bool:
    """Return whether `rate` is within 1 % of `other`."""
    return abs(rate - other) <= NEAR * other


def _usual(rate: Fraction) -> list[Fraction]:
    """Return the common rates near `rate`, the nearest first."""
    return sorted((x for x in USUAL if is_near(x, rate)), key=lambda x: abs(x - rate))


def _kept(rate: float) -> Fraction:
    """Return a rate as a small fraction in the range that files can store."""
    return min(max(Fraction(rate).limit_denominator(1001), LOWEST), Fraction(LIMIT - 1))
