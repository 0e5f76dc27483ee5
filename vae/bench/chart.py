"""The bar chart of a benchmark: seconds and memory of each contestant.

It is drawn with Pillow, which ComfyUI and the command line require, at twice its size and then
reduced, so that edges are smooth. Sizes here are those of the enlarged picture.
"""

import math

from PIL import Image, ImageDraw, ImageFont

from .report import BenchmarkReport, Comparison, seconds, size, times

_WIDTH, _HEIGHT = 2048, 1280
_MARGIN, _GAP, _HEAD, _FOOT, _INSET = 64, 40, 208, 120, 44

BACKGROUND, _CARD, _TRACK = (18, 20, 24), (27, 30, 36), (40, 44, 52)
INK, FAINT = (236, 238, 242), (150, 156, 168)
_BETTER, _WARNING = (126, 222, 156), (255, 140, 120)

# Of the first contestant, the baseline, and of the others.
COLORS = ((132, 140, 156), (92, 184, 255), (255, 186, 104), (150, 216, 150))

Pen = ImageDraw.ImageDraw
Box = tuple[float, float, float, float]  # left, top, right, bottom


def draw_chart(benchmark: BenchmarkReport) -> Image.Image:
    """Draw `benchmark` as an RGB picture of 1024 x 640 pixels."""
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), BACKGROUND)
    pen, comparisons, room = ImageDraw.Draw(picture), benchmark.comparisons, _WIDTH - 2 * _MARGIN
    tasks = " and ".join(each.task for each in comparisons)
    counted = "1 round" if benchmark.rounds == 1 else f"median of {benchmark.rounds} rounds"
    dtypes = " and ".join(dict.fromkeys(each.dtype for each in comparisons))
    about = benchmark.vae, dtypes, benchmark.device, counted
    differences = [
        f"{comparison.task}: {each.name} against {comparison.results[0].name} {each.agreement}"
        for comparison in comparisons
        for each in comparison.results[1:]
        if each.agreement
    ]
    line = _HEIGHT - _FOOT / 2
    write(pen, (_MARGIN, 84), f"{tasks.capitalize()} {benchmark.clip}", INK, 54, room=room)
    write(pen, (_MARGIN, 152), "   |   ".join(about), FAINT, 30, room=room)
    write(pen, (_MARGIN, line), "   |   ".join(differences), INK, 30, room=room - 300)
    write(pen, (_WIDTH - _MARGIN, line), "shorter is better", FAINT, 30, "rm")
    height = (_HEIGHT - _HEAD - _FOOT + _GAP) / len(comparisons)
    for row, comparison in enumerate(comparisons):
        top = _HEAD + row * height
        for memory in (False, True):
            left = _MARGIN + memory * (room + _GAP) / 2
            box = left, top, left + (room - _GAP) / 2, top + height - _GAP
            _card(pen, box, comparison, memory=memory)
    return picture.resize((_WIDTH // 2, _HEIGHT // 2), Image.Resampling.BOX)


def _card(pen: Pen, box: Box, comparison: Comparison, *, memory: bool) -> None:
    """Draw the bars of one task, of seconds or of memory, each below its name and value."""
    pen.rounded_rectangle(box, 24, _CARD)
    left, top, right, bottom = box[0] + _INSET, box[1] + 92, box[2] - _INSET, box[3] - 20
    what = "peak memory above weights and input" if memory else "time"
    write(pen, (left, box[1] + 52), f"{comparison.task}: {what}", FAINT, 30)
    results = comparison.results
    values = [each.peak_bytes if memory else each.median_s for each in results]
    longest = max(value or 0 for value in values)
    height = min(340.0, (bottom - top) / len(results))
    # The rows are centred in the free height of the card.
    first = (top + bottom - height * len(results)) / 2
    large = min(56.0, height * 0.28)
    for index, (each, value) in enumerate(zip(results, values, strict=True)):
        line = first + (index + 0.28) * height
        shown = write(pen, (left, line), each.name, INK, large * 0.85)
        text = each.failure or (size(each.peak_bytes) if memory else seconds(each.median_s))
        color = _WARNING if each.failure else FAINT if value is None else INK
        write(pen, (right, line), text, color, large, "rm")
        ratio = each.thrift if memory else each.speed
        if index and ratio is not None:
            word = f"{times(ratio)} {'less' if memory else 'as fast'}"
            if memory and ratio < 1:
                word = f"{times(1 / ratio)} as much"
            color = _BETTER if ratio >= 1 else _WARNING
            write(pen, (left + shown + 28, line), word, color, large * 0.85)
        bar, thick = line + large * 0.8, 0.39 * height
        radius = min(20.0, thick / 4)
        # At least as wide as its rounded corners, so that it is visible.
        end = left + max(2 * radius, (right - left) * value / longest) if value else left
        for edge, color in ((right, _TRACK), (end, COLORS[min(index, len(COLORS) - 1)])):
            if edge > left:
                pen.rounded_rectangle((left, bar, edge, bar + thick), radius, color)


def write(
    pen: Pen,
    place: tuple[float, float],
    text: str,
    color: tuple[int, int, int],
    points: float,
    anchor: str = "lm",
    *,
    room: float = math.inf,
) -> float:
    """Write a line of text, reduced to `room` pixels, and return its width in pixels."""
    while points > 18 and length(text, points) > room:
        points -= 1
    pen.text(place, _ascii(text), color, ImageFont.load_default(points), anchor=anchor)
    return length(text, points)


def length(text: str, points: float) -> float:
    """Return the width of a line of text in pixels, as `write` writes it."""
    return ImageFont.load_default(points).getlength(_ascii(text))


def _ascii(text: str) -> str:
    # Pillow's own font is always available; it has ASCII alone.
    return text.encode("ascii", "replace").decode()
