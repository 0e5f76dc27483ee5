"""Ranges of video frames as text, both ends included: `40-80`."""

import re

from .error_text import described

# Python does not parse numbers of thousands of digits.
_RANGE = re.compile(r"\s*(\d{1,18})\s*(-\s*(\d{0,18}))?\s*")


def frame_range(text: str, count: int | None) -> range:
    """Parse `40-80`, `40-`, `40` or all; without a `count` only the syntax is checked."""
    if not text.strip():
        return range(count or 0)
    match = _RANGE.fullmatch(text)
    if match is None:
        got = described(text)
        raise ValueError(f"frames is {got}; expected the first and the last, such as 40-80")
    if count is None:
        return range(0)
    first = int(match[1])
    last = int(match[3]) if match[3] else count - 1 if match[2] else first
    if not first <= last < count:
        raise ValueError(f"frames is {text!r}; the video has the frames 0-{count - 1}")
    return range(first, last + 1)
