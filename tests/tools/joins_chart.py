"""Draw media/joins.svg, the chart of docs/joins.md, from the newest rows of `bench_joins`.

`python tests/tools/joins_chart.py`. A column is a clip, a line is a way of handing over.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, CHART = ROOT / "tests/benchmarks/results.jsonl", ROOT / "media/joins.svg"

WAYS = {"plain": "#c8452f", "corrected": "#1f6fb5", "joined": "#2e8b57"}
LABELS = {"plain": "plain", "corrected": "3 corrections", "joined": "latents joined"}
PANELS = {"psnr": "PSNR to the source, dB", "saturation": "saturation, of 255 levels"}

WIDTH, HEIGHT = 250, 150  # of a panel
LEFT, TOP, ACROSS, DOWN = 62, 108, 62, 76
INK, FAINT, GRID = "#24292f", "#57606a", "#d8dee4"


def main() -> None:
    CHART.write_text(drawn(), encoding="utf-8")


def drawn() -> str:
    """Return the chart as SVG."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    newest = {(r["case"], r["implementation"]): r for r in rows if r["bench"] == "bench_joins"}
    clips = list(dict.fromkeys(clip for clip, _ in newest))
    width = LEFT + len(clips) * (WIDTH + ACROSS)
    height = TOP + len(PANELS) * (HEIGHT + DOWN) - 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for at, (way, label) in enumerate(LABELS.items()):
        x = LEFT + 140 * at
        parts.append(f'<path d="M{x} 28h26" stroke="{WAYS[way]}" stroke-width="3"/>')
        parts.append(text(x + 34, 33, label, INK))
    for column, clip in enumerate(clips):
        x = LEFT + column * (WIDTH + ACROSS)
        parts.append(text(x, TOP - 34, clip, INK, weight="600"))
        for row, name in enumerate(PANELS):
            lines = {way: newest[clip, way]["series"][name] for way in WAYS}
            parts += panel(x, TOP + row * (HEIGHT + DOWN), PANELS[name], lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(x: float, y: float, title: str, lines: dict[str, list[float]]) -> list[str]:
    """Return a panel with its grid, axes and lines."""
    values = [value for line in lines.values() for value in line]
    span = max(max(values) - min(values), 4)
    step = next(each for each in (1, 2, 5, 10) if span / each <= 5)
    low, high = step * (min(values) // step), step * -(-max(values) // step)
    count = len(next(iter(lines.values())))

    def place(at: int, value: float) -> str:
        return (
            f"{x + WIDTH * at / (count - 1):.1f},{y + HEIGHT * (high - value) / (high - low):.1f}"
        )

    parts = [text(x, y - 12, title, FAINT)]
    for tick in range(int(low), int(high) + 1, step):
        line = y + HEIGHT * (high - tick) / (high - low)
        parts.append(f'<path d="M{x} {line:.1f}h{WIDTH}" stroke="{GRID}"/>')
        parts.append(text(x - 8, line + 4, str(tick), FAINT, anchor="end"))
    for number in (1, count):
        at = x + WIDTH * (number - 1) / (count - 1)
        parts.append(text(at, y + HEIGHT + 20, str(number), FAINT, anchor="middle"))
    parts.append(text(x + WIDTH / 2, y + HEIGHT + 20, "hand-over", FAINT, "middle"))
    for way, series in lines.items():
        points = " ".join(place(at, value) for at, value in enumerate(series))
        style = f'fill="none" stroke="{WAYS[way]}" stroke-width="2.5"'
        parts.append(f'<polyline points="{points}" {style}/>')
    return parts


def text(
    x: float, y: float, words: str, color: str, anchor: str = "start", weight: str = "400"
) -> str:
    style = f'fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


if __name__ == "__main__":
    main()
