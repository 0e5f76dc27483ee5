"""Cells of a table get the width of their column."""

import pytest

from fast_video_vae.kernels import padded

ROWS = [["op", "count"], ["silu", "9"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, [["op  ", "count"], ["silu", "9    "]]),
        (1, [["op  ", "count"], ["silu", "    9"]]),
        (0, [["  op", "count"], ["silu", "    9"]]),
    ],
)
def test_words_stand_left_and_numbers_right(words, expected):
    assert padded(ROWS, words) == expected
