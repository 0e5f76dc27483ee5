"""Progress is a bar in a terminal, lines in a file, and nothing with `quiet`."""

import io
import sys

import pytest

pytest.importorskip("tqdm", reason="tqdm is not installed")

from fast_video_vae.vae.cli import progress_bar
from fast_video_vae.vae.cli.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, steps, total, **options):
    """Return the text on stderr; `steps` are pairs of seconds and work done."""
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = 0.0
    with ProgressBar("decode", total, clock=lambda: seconds, **options) as bar:
        for took, count in steps:
            seconds += took
            bar.update(count)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("steps", "total", "lines"),
    [
        ([(3, 4), (3, 4), (3.9, 4)], 12, []),  # shorter than ten seconds
        ([(10, 4)], 12, ["decode: 4 of 12 frames, 20.0 s left"]),
        ([(1, 1)] * 25, 50, ["decode: 10 of 50 frames, 40.0 s left",
                             "decode: 20 of 50 frames, 30.0 s left"]),
        ([(60, 4), (1, 4)], 8, ["decode: 4 of 8 frames, 60.0 s left"]),  # one second later: no line
        ([(12, 5)], None, ["decode: 5 frames, 12.0 s"]),  # the total is unknown
        ([(12, 5)], 4, ["decode: 5 frames, 12.0 s"]),  # the total is exceeded
    ],
)  # fmt: skip
def test_a_file_gets_a_line_every_ten_seconds(monkeypatch, steps, total, lines):
    assert shown(monkeypatch, io.StringIO(), steps, total) == lines


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(progress_bar, "BAR_DELAY_S", 0)
    states = shown(monkeypatch, Terminal(), [(60, 5), (60, 5)], 20, unit="runs")  # split at \\r
    assert any("0/20" in state for state in states)
    assert "decode:" not in "".join(states)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_shows_nothing(monkeypatch, stream):
    assert shown(monkeypatch, stream(), [(60, 5), (60, 5)], 20, quiet=True) == []


def test_a_total_can_grow(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = 0.0
    with ProgressBar("bench", 0, unit="runs", clock=lambda: seconds) as bar:
        bar.total = 6
        seconds = 11.0
        bar.update()
    assert stream.getvalue() == "bench: 1 of 6 runs, 55.0 s left\n"
