"""Cells of a table as text, for reports in a terminal and in Markdown."""

from collections.abc import Sequence


def padded(rows: Sequence[Sequence[str]], words: int | None = None) -> list[list[str]]:
    """Give every cell the width of its column.

    Args:
        rows: Of equal length.
        words: Columns whose cells stand to the left, as words do; those after them stand to the
            right, as numbers do. None: all of them are words.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = len(widths) if words is None else words
    return [
        [
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
