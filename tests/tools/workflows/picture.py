"""Thumbnails of workflows whose models are too large to run here: their decisive nodes, large.

The Templates dialog shows a thumbnail 256 pixels wide, and a badge on its upper left corner. A
picture of a whole graph is a pattern of rectangles at that size; of five blocks one can read each.
"""

from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

SIZE = 1024

_BADGE = 176  # pixels from the top that the dialog covers
_EDGE = 48  # around the blocks, and between the blocks of a row
_BETWEEN = 50  # between rows
_TITLE, _NOTE = 68, 52  # 17 and 13 pixels in the dialog

_GROUND, _LINK = "#17181c", "#d8b25c"
_USUAL = ("#2b4257", "#4f7ea3")
_FAST = ("#2f5137", "#7fc98a")


@dataclass(frozen=True)
class Block:
    """A node, or several that do one thing.

    Attributes:
        title: What it is, in about 20 characters, or half of that in a row of two.
        note: More about it, in smaller letters.
        fast: Whether it is of this pack.
    """

    title: str
    note: str = ""
    fast: bool = False


Rows = tuple[tuple[Block, ...], ...]


def picture(rows: Rows) -> Image.Image:
    """Draw rows of blocks, each row linked to the next one.

    Args:
        rows: From top to bottom; of one or two blocks.

    Raises:
        ValueError: A text is wider than its block.
    """
    image = Image.new("RGB", (SIZE, SIZE), _GROUND)
    pen = ImageDraw.Draw(image)
    height = (SIZE - _BADGE - _EDGE - _BETWEEN * (len(rows) - 1)) / len(rows)
    placed = []
    for number, row in enumerate(rows):
        top = _BADGE + number * (height + _BETWEEN)
        width = (SIZE - _EDGE * (len(row) + 1)) / len(row)
        lefts = [_EDGE + at * (width + _EDGE) for at in range(len(row))]
        placed.append([(left, top, left + width, top + height) for left in lefts])
    for above, below in pairwise(placed):
        for one in above:
            for other in below:
                _link(pen, (_middle(one), one[3]), (_middle(other), other[1]))
    for boxes, row in zip(placed, rows, strict=True):
        for box, block in zip(boxes, row, strict=True):
            _draw(pen, box, block)
    return image


def _draw(pen: ImageDraw.ImageDraw, box: tuple[float, ...], block: Block) -> None:
    ground, rim = _FAST if block.fast else _USUAL
    pen.rounded_rectangle(box, radius=26, fill=ground, outline=rim, width=6)
    middle = (box[1] + box[3]) / 2
    apart = 36 if block.note else 0
    lines = ((block.title, _TITLE, -apart + 4, "#ffffff"), (block.note, _NOTE, apart, "#cfd6dd"))
    for text, size, down, color in lines:
        font = ImageFont.load_default(size)
        if font.getlength(text) > box[2] - box[0] - 24:
            raise ValueError(f"{text!r} is {font.getlength(text):.0f} pixels wide; expected less")
        pen.text((_middle(box), middle + down), text, font=font, fill=color, anchor="mm")


def _link(pen: ImageDraw.ImageDraw, start: tuple[float, float], end: tuple[float, float]) -> None:
    pen.line([start, end], fill=_LINK, width=10)
    for x, y in (start, end):
        pen.ellipse((x - 15, y - 15, x + 15, y + 15), fill=_LINK)


def _middle(box: tuple[float, ...]) -> float:
    return (box[0] + box[2]) / 2
