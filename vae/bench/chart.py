"""The bar chart of a benchmark: seconds and memory of each contestant."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from .pen import (
    CARD,
    FAINT,
    FOOT,
    GAP,
    HEAD,
    HEIGHT,
    INK,
    MARGIN,
    TRACK,
    WARNING,
    WIDTH,
    Color,
    Pen,
)
from .report import BenchmarkReport, Comparison, seconds, size, times

# Of the first contestant, the baseline, and of the others.
COLORS = ((132, 140, 156), (92, 184, 255), (255, 186, 104), (150, 216, 150))
BETTER = (126, 222, 156)


@dataclass(frozen=True)
class _Bar:
    """One bar; without a value it is empty."""

    name: str
    value: float | None
    text: str
    ratio: str  # to the first contestant, as text
    is_better: bool
    color: Color


def draw_chart(benchmark: BenchmarkReport) -> Image.Image:
    """Draw `benchmark` as an RGB picture."""
    pen = Pen()
    room = WIDTH - 2 * MARGIN
    tasks = " and ".join(each.task for each in benchmark.comparisons)
    title = f"{tasks[:1].upper()}{tasks[1:]} {benchmark.clip}"
    counted = "1 round" if benchmark.rounds == 1 else f"median of {benchmark.rounds} rounds"
    dtypes = " and ".join(dict.fromkeys(each.dtype for each in benchmark.comparisons))
    about = "   |   ".join([benchmark.vae, dtypes, benchmark.device, counted])
    pen.text((MARGIN, 42), title, INK, 27, room=room)
    pen.text((MARGIN, 76), about, FAINT, 15, room=room)

    count = len(benchmark.comparisons)
    card_width = (room - GAP) / 2
    card_height = (HEIGHT - HEAD - FOOT - (count - 1) * GAP) / count
    for row, comparison in enumerate(benchmark.comparisons):
        top = HEAD + row * (card_height + GAP)
        for column, (what, bars) in enumerate(_panels(comparison)):
            left = MARGIN + column * (card_width + GAP)
            box = left, top, left + card_width, top + card_height
            _card(pen, box, f"{comparison.task}: {what}", bars)

    pen.text((MARGIN, HEIGHT - FOOT / 2), _foot(benchmark), INK, 15, room=room - 150)
    pen.text((WIDTH - MARGIN, HEIGHT - FOOT / 2), "shorter is better", FAINT, 15, "rm")
    return pen.done()


def _panels(comparison: Comparison) -> list[tuple[str, list[_Bar]]]:
    """Return the titles and bars of one task: seconds and memory."""
    time, memory = [], []
    for index, each in enumerate(comparison.results):
        color = COLORS[min(index, len(COLORS) - 1)]
        for bars, value, text, ratio, word in (
            (time, each.median, seconds(each.median), comparison.speed(each), "as fast"),
            (memory, each.peak_bytes, size(each.peak_bytes), comparison.thrift(each), "less"),
        ):
            is_better = ratio is not None and ratio >= 1
            label = ""
            if index and ratio is not None:
                label = f"{times(ratio)} {word}"
                if word == "less" and not is_better:
                    label = f"{times(1 / ratio)} as much"
            bars.append(_Bar(each.name, value, each.failure or text, label, is_better, color))
    return [("time", time), ("peak memory above weights and input", memory)]


def _card(
    pen: Pen, box: tuple[float, float, float, float], title: str, bars: Sequence[_Bar]
) -> None:
    """Draw a panel of bars, each below its name and value."""
    left, top, right, bottom = box
    pen.box(box, CARD, 12)
    left, right = left + 22, right - 22
    pen.text((left, top + 26), title, FAINT, 15)
    longest = max((bar.value or 0 for bar in bars), default=0)
    row_height = min(170.0, (bottom - top - 56) / len(bars))
    # The rows are centred in the free height of the card.
    first = top + 46 + (bottom - top - 56 - row_height * len(bars)) / 2
    large = min(28.0, row_height * 0.28)
    for index, bar in enumerate(bars):
        line = first + index * row_height + row_height * 0.28
        shown = pen.text((left, line), bar.name, INK, large * 0.85)
        color = FAINT if bar.value is None else INK
        color = WARNING if bar.text.startswith("out of") else color
        pen.text((right, line), bar.text, color, large, "rm")
        if bar.ratio:
            better = BETTER if bar.is_better else WARNING
            pen.text((left + shown + 14, line), bar.ratio, better, large * 0.85)
        bar_top, bar_bottom = line + large * 0.8, first + (index + 0.9) * row_height
        thick = min(0.4 * row_height, bar_bottom - bar_top)
        radius = min(10.0, thick / 4)
        pen.box((left, bar_top, right, bar_top + thick), TRACK, radius)
        if bar.value and longest:
            # At least as wide as its rounded corners, so that it is visible.
            end = left + max(2 * radius, (right - left) * bar.value / longest)
            pen.box((left, bar_top, end, bar_top + thick), bar.color, radius)


def _foot(benchmark: BenchmarkReport) -> str:
    """Return the line about the differences between results."""
    parts = []
    for comparison in benchmark.comparisons:
        first = comparison.results[0].name
        parts += [
            f"{comparison.task}: {each.name} against {first} {each.agreement()}"
            for each in comparison.results[1:]
            if each.agreement()
        ]
    return "   |   ".join(parts)
