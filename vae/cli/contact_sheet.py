"""The contact sheet: source, result and difference of frames spread evenly over a clip.

The length of a clip may be unknown until its end, so pictures are kept at a stride that doubles
whenever there are too many; this bounds memory. They are kept at the size of the sheet. The
difference is taken first, at full size, because reduction averages it away.
"""

import itertools
import math
from dataclasses import dataclass

from PIL import Image, ImageDraw
from torch import Tensor

from ..bench.chart import BACKGROUND, FAINT, INK, length, write

COLUMNS = 7
# Frames kept: half of this to all of it, so a column is at most 1/40 of the clip from its ideal
# place, and the pictures take at most 25 MB.
KEPT = 6 * COLUMNS
CELL = 256  # longer side in pixels; smaller pictures grow by whole factors
FRAME = (44, 48, 56)
ACCENT = (122, 200, 255)
MARGIN, GAP, LABELS, HEAD, FOOT, FOOTNOTE = 28, 8, 112, 76, 30, 34
# The difference is amplified so that all but one in 50 of its values stay below white.
SHOWN_SHARE = 0.98
MAX_FACTOR = 64


@dataclass(frozen=True)
class _Column:
    """One frame: its number in the clip and its pictures, scaled for the sheet."""

    index: int
    source: Image.Image
    result: Image.Image
    difference: Image.Image


class ContactSheet:
    """Collects frames of a clip and draws them at the end."""

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self._stride = 1
        self._seen = 0

    def add(self, source: Tensor, result: Tensor) -> None:
        """Add the next frames, `source` and `result`, both `[t, H, W, 3]` uint8 on the CPU."""
        for before, after in zip(source, result, strict=True):
            if self._seen % self._stride == 0:
                self._keep(before, after)
            self._seen += 1

    def draw(self, title: str, verdict: str, footnote: str = "") -> Image.Image:
        """Draw the collected frames as RGB; characters outside of ASCII become question marks."""
        if not self._columns:
            raise ValueError("the contact sheet has no frames; expected at least one")
        columns = _spread(self._columns, COLUMNS)
        factor = _amplification([column.difference for column in columns])
        rows = [
            ("source", "", [column.source for column in columns]),
            ("result", "decoded", [column.result for column in columns]),
            ("difference", f"x {factor}", [_amplified(c.difference, factor) for c in columns]),
        ]
        width, height = columns[0].source.size
        # Wide enough for the title, even with one frame.
        words = ((26, verdict), (22, title), (18, footnote))
        lengths = [length(text, points) for points, text in words]
        needed = max(int(lengths[0] + lengths[1]) + 60, int(lengths[2]) + 1)
        inner = max(LABELS + len(columns) * (width + GAP) - GAP, needed)
        bottom = HEAD + len(rows) * (height + GAP) + FOOT
        size = (inner + 2 * MARGIN, bottom + (FOOTNOTE if footnote else 0) + MARGIN)
        sheet = Image.new("RGB", size, BACKGROUND)
        pen = ImageDraw.Draw(sheet)
        line = HEAD // 2 + 4
        write(pen, (MARGIN, line), title, INK, 22)
        write(pen, (size[0] - MARGIN, line), verdict, ACCENT, 26, "rm")
        for row, (name, remark, pictures) in enumerate(rows):
            _draw_row(sheet, pen, HEAD + row * (height + GAP), name, remark, pictures)
        for place, column in enumerate(columns):
            left = MARGIN + LABELS + place * (width + GAP) + width // 2
            top = HEAD + len(rows) * (height + GAP) + 6
            write(pen, (left, top), f"frame {column.index}", FAINT, 15, "mt")
        write(pen, (MARGIN, bottom + FOOTNOTE // 2), footnote, ACCENT, 18)
        return sheet

    def _keep(self, source: Tensor, result: Tensor) -> None:
        error = (source.int() - result.int()).abs().to(source.dtype)
        pictures = [_fitted(Image.fromarray(x.numpy())) for x in (source, result, error)]
        self._columns.append(_Column(self._seen, *pictures))
        if len(self._columns) > KEPT:
            self._columns = self._columns[::2]
            self._stride *= 2


def _draw_row(
    sheet: Image.Image,
    pen: ImageDraw.ImageDraw,
    top: int,
    name: str,
    remark: str,
    pictures: list[Image.Image],
) -> None:
    """Draw pictures side by side, with a label to their left."""
    width, height = pictures[0].size
    write(pen, (MARGIN, top + height // 2 - 10), name, INK, 18)
    write(pen, (MARGIN, top + height // 2 + 14), remark, FAINT, 15)
    for place, picture in enumerate(pictures):
        left = MARGIN + LABELS + place * (width + GAP)
        sheet.paste(picture, (left, top))
        pen.rectangle((left - 1, top - 1, left + width, top + height), outline=FRAME)


def _spread(columns: list[_Column], count: int) -> list[_Column]:
    """Return `count` of the columns at even distances, including the first and the last."""
    if len(columns) <= count:
        return columns
    step = (len(columns) - 1) / (count - 1)
    return [columns[round(place * step)] for place in range(count)]


def _fitted(picture: Image.Image) -> Image.Image:
    """Reduce a picture to the cell by averaging, or enlarge it by a whole factor."""
    longer = max(picture.size)
    if longer > CELL:
        size = [max(1, round(side * CELL / longer)) for side in picture.size]
        return picture.resize((size[0], size[1]), Image.Resampling.BOX)
    steps = CELL // longer
    width, height = picture.size
    return picture.resize((width * steps, height * steps), Image.Resampling.NEAREST)


def _amplification(differences: list[Image.Image]) -> int:
    """Return the largest power of two that keeps `SHOWN_SHARE` of the values below white."""
    counts = [0] * 256
    for picture in differences:
        for value, count in enumerate(picture.histogram()):
            counts[value % 256] += count
    below = itertools.accumulate(counts)
    value = next(value for value, count in enumerate(below) if count >= SHOWN_SHARE * sum(counts))
    return min(MAX_FACTOR, 2 ** int(math.log2(255 / max(1, value))))


def _amplified(picture: Image.Image, factor: int) -> Image.Image:
    return picture.point([min(255, value * factor) for value in range(256)] * 3)
