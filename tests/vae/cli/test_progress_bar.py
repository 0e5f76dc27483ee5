"""Progress is a bar in a terminal, lines in a file, and nothing with `quiet`."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tqdm", reason="tqdm is not installed")

from fast_video_vae.vae.cli import progress_bar
from fast_video_vae.vae.cli.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, steps, total, **options):
    """Return the lines on stderr; `steps` are pairs of seconds and work done."""
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr(progress_bar, "time", clock)
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar("decode", total if stream.isatty() else 0, **options) as bar:
        bar.total = total  # it may change
        for took, count in steps:
            clock.seconds += took
            bar.update(count)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("steps", "total", "lines"),
    [
        ([(9.9, 4)], 12, []),
        ([(10, 4)], 12, ["decode: 4 of 12 frames, 20.0 s left"]),
        ([(1, 1)] * 25, 50, ["decode: 10 of 50 frames, 40.0 s left",
                             "decode: 20 of 50 frames, 30.0 s left"]),
        ([(12, 5)], None, ["decode: 5 frames, 12.0 s"]),  # the total is unknown
        ([(12, 5)], 4, ["decode: 5 frames, 12.0 s"]),  # the total is exceeded
    ],
)  # fmt: skip
def test_a_file_gets_a_line_every_ten_seconds(monkeypatch, steps, total, lines):
    assert shown(monkeypatch, io.StringIO(), steps, total) == lines


def test_a_terminal_gets_a_bar_and_quiet_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress_bar, "BAR_DELAY_S", 0)
    steps = [(60, 5), (60, 5)]
    bar = "".join(shown(monkeypatch, Terminal(), steps, 20, unit="runs"))
    assert "0/20" in bar
    assert "decode:" not in bar
    for stream in (io.StringIO(), Terminal()):
        assert shown(monkeypatch, stream, steps, 20, quiet=True) == []


def test_pieces_that_are_read_again_count_once(monkeypatch):
    pieces, stream = [torch.empty(1, 3, count, 1, 1) for count in (1, 4, 4)], io.StringIO()
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar("encode", 9) as bar:
        assert len([*zip(range(2), bar.counted(pieces), strict=False)]) == 2  # memory runs out
        assert len([*bar.counted(pieces)]) == 3
    assert stream.getvalue().splitlines()[-1].startswith("encode: 9 of 9 frames, ")
