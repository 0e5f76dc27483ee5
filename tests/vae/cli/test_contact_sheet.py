"""The contact sheet shows frames spread over the clip: source, result and difference."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="Pillow is not installed")

from fast_video_vae.vae.cli import contact_sheet as sheet


def collected(frames, height=32, width=48, error=10, run=5):
    """Return the sheet of a clip: frame i has level i % 200, its result is `error` levels above."""
    level = (torch.arange(frames) % 200).to(torch.uint8).view(-1, 1, 1, 1)
    source = level.expand(-1, height, width, 3)
    result = source + error
    drawn = sheet.ContactSheet()
    for start in range(0, frames, run):
        drawn.add(source[start : start + run], result[start : start + run])
    return drawn


@pytest.mark.parametrize("frames", [1, 7, 43, 500])
def test_columns_are_spread_over_the_clip(frames, monkeypatch):
    held, words, write = collected(frames), [], sheet.write
    monkeypatch.setattr(sheet, "write", lambda *given: (words.append(given[2]), write(*given)))
    held.draw("\u65e5\u672c.mp4", "PSNR inf dB")  # any characters
    places = [int(each) for word in words for each in re.findall(r"^frame (\d+)$", word)]
    assert len(held._columns) <= sheet.KEPT  # so memory does not grow with the clip
    assert len(places) == min(frames, sheet.COLUMNS)
    assert places == sorted(set(places))
    assert places[0] == 0
    ideal = np.linspace(0, frames - 1, len(places))
    assert np.abs(np.subtract(places, ideal)).max() <= max(0.5, frames / 20)


@pytest.mark.parametrize(
    ("height", "width", "error", "shown"),
    [
        (32, 48, 1, sheet.MAX_FACTOR),  # enlarged
        (480, 832, 10, 160),  # reduced; a factor of 32 would exceed 255
        (512, 304, 55, 220),  # portrait
    ],
)
def test_each_row_shows_its_frames_and_an_amplified_difference(height, width, error, shown):
    drawn = collected(9, height, width, error)
    picture = np.array(drawn.draw("a clip", "PSNR 28.13 dB"))
    cell = sheet.CELL // max(height, width) or sheet.CELL / max(height, width)
    middle = sheet.MARGIN + sheet.LABELS + round(width * cell) // 2
    rows = [
        sheet.HEAD + row * (round(height * cell) + sheet.GAP) + round(height * cell) // 2
        for row in range(3)
    ]
    # Frame 0: the source has level 0, the result `error`, the difference is amplified.
    assert [picture[row, middle].tolist() for row in rows] == [[0] * 3, [error] * 3, [shown] * 3]
