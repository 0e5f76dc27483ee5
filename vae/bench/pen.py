"""The look of the pictures of a benchmark, and the pen that draws them.

They are drawn with Pillow, which ComfyUI and the command line require, at twice the size and then
reduced, so that edges are smooth.
"""

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 1024, 640
BACKGROUND = (18, 20, 24)
CARD = (27, 30, 36)
TRACK = (40, 44, 52)
INK = (236, 238, 242)
FAINT = (150, 156, 168)
WARNING = (255, 140, 120)
MARGIN, GAP, HEAD, FOOT = 32, 20, 104, 60
_SHARP = 2

Color = tuple[int, int, int]


class Pen:
    """Draws on an enlarged picture in pixels of the final one."""

    def __init__(self) -> None:
        self._picture = Image.new("RGB", (WIDTH * _SHARP, HEIGHT * _SHARP), BACKGROUND)
        self._draw = ImageDraw.Draw(self._picture)

    def box(self, box: tuple[float, float, float, float], color: Color, radius: float) -> None:
        """Draw a rectangle (left, top, right, bottom) with rounded corners."""
        scaled = [round(each * _SHARP) for each in box]
        self._draw.rounded_rectangle(scaled, round(radius * _SHARP), fill=color)

    def text(
        self,
        place: tuple[float, float],
        text: str,
        color: Color,
        points: float,
        anchor: str = "lm",
        room: float | None = None,
    ) -> float:
        """Draw a line of text, reduced to `room` pixels, and return its width in pixels."""
        text, font = ascii_only(text), default_font(points * _SHARP)
        while room is not None and points > 9 and font.getlength(text) > room * _SHARP:
            points -= 0.5
            font = default_font(points * _SHARP)
        self._draw.text((place[0] * _SHARP, place[1] * _SHARP), text, color, font, anchor=anchor)
        return font.getlength(text) / _SHARP

    def done(self) -> Image.Image:
        """Return the picture in its final size."""
        return self._picture.resize((WIDTH, HEIGHT), Image.Resampling.BOX)


def ascii_only(text: str) -> str:
    """Return `text` with question marks for the characters that Pillow's own font lacks."""
    return text.encode("ascii", "replace").decode()


def default_font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, which is always available, in the given `size`."""
    return ImageFont.load_default(size)
