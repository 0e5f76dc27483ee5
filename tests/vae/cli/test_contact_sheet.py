"""The contact sheet: which frames it shows, and that the pictures are theirs."""

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="Pillow is not installed")

from fast_video_vae.vae.cli import contact_sheet as sheet


def collected(frames, height=32, width=48, error=10, run=5):
    """A sheet of a clip whose frame i has the level i % 200, and a result `error` levels above."""
    level = (torch.arange(frames) % 200).to(torch.uint8).view(-1, 1, 1, 1)
    source = level.expand(-1, height, width, 3)
    result = source + error
    drawn = sheet.ContactSheet()
    for start in range(0, frames, run):
        drawn.add(source[start : start + run], result[start : start + run])
    return drawn


@pytest.mark.parametrize("frames", [1, 2, 6, 7, 8, 33, 42, 43, 81, 500, 1001])
def test_columns_are_spread_over_the_clip(frames):
    held = collected(frames)._columns
    assert len(held) <= sheet.KEPT  # so memory does not grow with the clip
    places = [column.index for column in sheet._spread(held, sheet.COLUMNS)]
    assert len(places) == min(frames, sheet.COLUMNS)
    assert places[0] == 0
    assert places == sorted(set(places))
    ideal = np.linspace(0, frames - 1, len(places))
    assert np.abs(np.subtract(places, ideal)).max() <= max(0.5, frames / 20)


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (32, 48),  # grows
        (256, 256),
        (480, 832),  # shrinks
        (1080, 608),  # upright
    ],
)
def test_each_row_shows_its_pictures(height, width):
    picture = np.array(collected(9, height, width).draw("a clip", "PSNR 28.13 dB"))
    cell = sheet.CELL // max(height, width) or sheet.CELL / max(height, width)
    middle = sheet.MARGIN + sheet.LABELS + round(width * cell) // 2
    rows = [
        sheet.HEAD + row * (round(height * cell) + sheet.GAP) + round(height * cell) // 2
        for row in range(3)
    ]
    # Frame 0: level 0; 10 levels above; the difference of 10 levels, 16-fold.
    assert [picture[row, middle].tolist() for row in rows] == [[0] * 3, [10] * 3, [160] * 3]


@pytest.mark.parametrize(
    ("error", "factor"),
    [
        (0, sheet.MAX_FACTOR),  # identical
        (1, sheet.MAX_FACTOR),
        (10, 16),  # 160; 32-fold would be too bright
        (55, 4),
    ],
)
def test_the_difference_is_made_visible(error, factor):
    held = collected(3, error=error)._columns
    assert sheet._amplification([column.difference for column in held]) == factor


def test_a_title_may_hold_any_letters():
    assert collected(1).draw("\u65e5\u672c.mp4", "PSNR inf dB").width > 300


def test_a_sheet_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no frames; expected at least one"):
        sheet.ContactSheet().draw("", "")
