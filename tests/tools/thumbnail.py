"""Draw the thumbnail of a workflow whose models are too large to run here: its decisive nodes.

`python tests/tools/thumbnail.py FILE.jpg "Load VAE (Fast)*" "Positive & Negative" "WanVideo
Decode|and other nodes"`: each argument is a row, linked to the next one, of blocks with `&` between
them. A block is a title, after `|` a note, and at the end `*` if the node is of this pack. The
Templates dialog shows 256 pixels, with a badge on the upper left corner.
"""

import sys
from itertools import pairwise, product

from PIL import Image, ImageDraw, ImageFont

SIZE = 1024
BADGE = 176  # pixels from the top that the dialog covers
EDGE, BETWEEN = 48, 50  # around the blocks and between those of a row; between rows
TITLE, NOTE = 68, 52  # 17 and 13 pixels in the dialog
GROUND, LINK, WHITE, SOFT = "#17181c", "#d8b25c", "#ffffff", "#cfd6dd"
USUAL, FAST = ("#2b4257", "#4f7ea3"), ("#2f5137", "#7fc98a")


def draw(rows: list[list[str]]) -> Image.Image:
    image = Image.new("RGB", (SIZE, SIZE), GROUND)
    pen = ImageDraw.Draw(image)
    height = (SIZE - BADGE - EDGE - BETWEEN * (len(rows) - 1)) / len(rows)
    boxes = []
    for number, row in enumerate(rows):
        top = BADGE + number * (height + BETWEEN)
        width = (SIZE - EDGE * (len(row) + 1)) / len(row)
        lefts = (EDGE + at * (width + EDGE) for at in range(len(row)))
        boxes.append([(left, top, left + width, top + height) for left in lefts])
    for above, below in pairwise(boxes):
        for one, other in product(above, below):
            ends = ((one[0] + one[2]) / 2, one[3]), ((other[0] + other[2]) / 2, other[1])
            pen.line(ends, fill=LINK, width=10)
            for x, y in ends:
                pen.ellipse((x - 15, y - 15, x + 15, y + 15), fill=LINK)
    for places, row in zip(boxes, rows, strict=True):
        for box, block in zip(places, row, strict=True):
            draw_block(pen, box, block)
    return image


def draw_block(pen: ImageDraw.ImageDraw, box: tuple[float, ...], block: str) -> None:
    ground, rim = FAST if block.endswith("*") else USUAL
    pen.rounded_rectangle(box, radius=26, fill=ground, outline=rim, width=6)
    title, _, note = block.removesuffix("*").partition("|")
    apart = 36 if note else 0
    for text, size, down, color in ((title, TITLE, 4 - apart, WHITE), (note, NOTE, apart, SOFT)):
        font = ImageFont.load_default(size)
        if font.getlength(text) > box[2] - box[0] - 24:
            sys.exit(f"{text!r} is {font.getlength(text):.0f} pixels wide; expected less")
        middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2 + down
        pen.text(middle, text, font=font, fill=color, anchor="mm")


if __name__ == "__main__":
    picture = draw([[block.strip() for block in row.split("&")] for row in sys.argv[2:]])
    picture.save(sys.argv[1], "JPEG", quality=92, optimize=True, progressive=True)
