"""The contact sheet: source, result and difference of frames spread evenly over a clip.

The length of a clip may be unknown until its end, so pictures are kept at a stride that doubles
whenever there are too many; this bounds memory. They are kept at the size of the sheet. The
difference is taken first, at full size, because reduction averages it away.
"""

import math
from collections.abc import Iterable

import numpy
import torch
from PIL import Image, ImageChops, ImageDraw, ImageOps
from torch import Tensor
from torch.nn import functional

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


class ContactSheet:
    """Compares the frames of a clip, collects some of them, and draws these at the end."""

    def __init__(self) -> None:
        # Number in the clip, and source, result and difference, scaled for the sheet.
        self._columns: list[tuple[int, list[Image.Image]]] = []
        self._stride, self._seen = 1, 0
        self._error, self._values = 0.0, 0

    def add(self, source: Tensor, result: Tensor) -> None:
        """Add the next frames, `[t, H, W, 3]` and `[t, s H, s W, 3]`, uint8 on the CPU.

        A larger result is averaged down to the size of the source.
        """
        if result.shape != source.shape:
            scale = result.shape[1] // source.shape[1]
            small = functional.avg_pool2d(result.permute(0, 3, 1, 2).float(), scale).round_()
            result = small.to(torch.uint8).permute(0, 2, 3, 1)
        error = source.float() - result.float()
        self._error += error.square_().sum(dtype=torch.float64).item()
        self._values += error.numel()
        for frames in zip(source, result, strict=True):
            if self._seen % self._stride == 0:
                before, after = (Image.fromarray(frame.numpy()) for frame in frames)
                pictures = (before, after, ImageChops.difference(before, after))
                self._columns.append((self._seen, [_fitted(each) for each in pictures]))
            if len(self._columns) > KEPT:
                self._columns = self._columns[::2]
                self._stride *= 2
            self._seen += 1

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio in dB over all frames; infinite if all values are equal."""
        return 10 * math.log10(255**2 * self._values / self._error) if self._error else math.inf

    def draw(self, title: str, verdict: str, footnote: str = "") -> Image.Image:
        """Draw the collected frames as RGB; characters outside of ASCII become question marks."""
        # At even distances, including the first and the last.
        count = min(COLUMNS, len(self._columns))
        step = (len(self._columns) - 1) / max(1, count - 1)
        numbers, columns = zip(*(self._columns[round(n * step)] for n in range(count)), strict=True)
        sources, results, differences = zip(*columns, strict=True)
        factor = _amplification(differences)
        shown = [each.point(lambda value: min(255, value * factor)) for each in differences]
        width, height = sources[0].size
        # Wide enough for the title and the footnote, even with one frame.
        needed = max(length(verdict, 26) + length(title, 22) + 60, length(footnote, 18) + 1)
        inner = max(LABELS + count * (width + GAP) - GAP, int(needed))
        bottom = HEAD + 3 * (height + GAP) + FOOT
        size = (inner + 2 * MARGIN, bottom + (FOOTNOTE if footnote else 0) + MARGIN)
        sheet = Image.new("RGB", size, BACKGROUND)
        pen = ImageDraw.Draw(sheet)
        write(pen, (MARGIN, HEAD // 2 + 4), title, INK, 22)
        write(pen, (size[0] - MARGIN, HEAD // 2 + 4), verdict, ACCENT, 26, "rm")
        tops = range(HEAD, bottom - FOOT, height + GAP)
        remarks = {"source": "", "result": "decoded", "difference": f"x {factor}"}
        for top, (name, remark) in zip(tops, remarks.items(), strict=True):
            write(pen, (MARGIN, top + height // 2 - 10), name, INK, 18)
            write(pen, (MARGIN, top + height // 2 + 14), remark, FAINT, 15)
        left = MARGIN + LABELS
        for number, *pictures in zip(numbers, sources, results, shown, strict=True):
            for top, picture in zip(tops, pictures, strict=True):
                sheet.paste(ImageOps.expand(picture, 1, FRAME), (left - 1, top - 1))
            write(pen, (left + width // 2, bottom - FOOT + 6), f"frame {number}", FAINT, 15, "mt")
            left += width + GAP
        write(pen, (MARGIN, bottom + FOOTNOTE // 2), footnote, ACCENT, 18)
        return sheet


def _fitted(picture: Image.Image) -> Image.Image:
    """Reduce a picture to the cell by averaging, or enlarge it by a whole factor."""
    longer = max(picture.size)
    if longer > CELL:
        width, height = (max(1, round(side * CELL / longer)) for side in picture.size)
        return picture.resize((width, height), Image.Resampling.BOX)
    return ImageOps.scale(picture, CELL // longer, Image.Resampling.NEAREST)


def _amplification(differences: Iterable[Image.Image]) -> int:
    """Return the largest power of two that keeps `SHOWN_SHARE` of the values below white."""
    counts = numpy.sum([picture.histogram() for picture in differences], axis=0)
    below = counts.reshape(3, 256).sum(axis=0).cumsum()
    value = int(numpy.searchsorted(below, SHOWN_SHARE * below[-1]))
    return min(MAX_FACTOR, 2 ** int(math.log2(255 / max(1, value))))
