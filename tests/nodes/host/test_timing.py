"""Timing of a prompt: the measured pieces, their table, and when it is printed."""

import contextlib
import contextvars
import json
import random
import threading
import time
import types

import pytest
import torch

from fast_video_vae.tests.nodes.host.clocks import (
    FakeEvent,
    end,
    in_prompt,
    in_thread,
    lengths,
    printed,
    rows,
    timings,
)

pytestmark = pytest.mark.comfyui

CUDA = torch.device("cuda", 0)


def test_the_table_has_a_row_for_every_kind_and_label(timing, clock):
    for kind, label, length in (
        ("file", "", 0.25),
        ("denoise", "high noise", 2.0),
        ("denoise", "high noise", 1.0),
        ("denoise", "low noise", 3.0),
        ("load", "wan.safetensors", 10.0),
        ("denoise", "high noise", 1.5),
    ):
        with timing.span(kind, label):
            clock.passes(length)
        clock.passes(0.125)
    assert timing.text().splitlines() == [
        "Fast Video VAE: 17.750 s measured of 18.375 s",
        "                            count  seconds    min  median",
        "  load     wan.safetensors      1   10.000",
        "  denoise  high noise           3    4.500  1.000   1.500",
        "  denoise  low noise            1    3.000",
        "  file                          1    0.250",
    ]


def test_empty_columns_are_left_out(timing, clock):
    with timing.span("VAE decode"):
        clock.passes(2)
    assert timing.text().splitlines()[1:] == [
        "              count  seconds",
        "  VAE decode      1    2.000",
    ]


def test_rows_are_sorted_in_the_order_of_the_work(timing, clock):
    from fast_video_vae.nodes.host.timing_report import KINDS

    shuffled = ["of another pack", *KINDS]
    random.Random(1).shuffle(shuffled)
    for kind in shuffled:
        with timing.span(kind):
            clock.passes(1)
    assert [kind for kind, _ in rows(timing)] == [*KINDS, "of another pack"]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (
            [("file", 6, 6.5), ("load", 1, 6.5), ("compile", 8.5, 8.75), ("VAE decode", 0, 8.75)],
            {"VAE decode": 3, "load": 5, "compile": 0.25, "file": 0.5},
        ),
        ([("file", 0, 2), ("VAE decode", 1, 3)], {"file": 2, "VAE decode": 2}),
        (
            [("file", 0, 0), ("VAE decode", 0, 0), ("file", 0, 1), ("VAE decode", 0, 1)],
            {"VAE decode": 0, "file": 1},
        ),
    ],
    ids=["within", "overlap", "no time"],
)
def test_inner_pieces_are_subtracted_from_outer_ones(timing, pieces, expected):
    for kind, first, last in pieces:
        timing.add(kind, timing.Instant(first), timing.Instant(last))
    assert lengths(timing) == expected


def test_nested_pieces_of_one_row_count_once(timing, clock):
    with timing.span("load"):
        clock.passes(1)
        with timing.span("load"):
            clock.passes(2)
            with timing.span("file"):
                clock.passes(4)
        with timing.span("load", "another"):
            clock.passes(8)
    found = {key: (row["count"], row["seconds"]) for key, row in rows(timing).items()}
    assert found == {("load", ""): (1, 3), ("load", "another"): (1, 8), ("file", ""): (1, 4)}
    assert timings(timing)["measured"] == timings(timing)["wall"] == 15


def test_a_device_measures_its_own_seconds_without_a_wait(timing, clock, device):
    for seconds in (3.0, 1.0, 2.0):
        with timing.span("denoise", device=CUDA):
            clock.passes(0.01)
            device.works(seconds)
    assert device.waits == 0
    row = rows(timing)["denoise", ""]
    assert not row["sure"]
    assert row["seconds"] == pytest.approx(0.03)  # of the host, until the device is done
    assert "~0.030" in timing.text()
    assert "the device is busy" in timing.text()
    assert device.waits == 0
    device.catch_up()
    row = rows(timing)["denoise", ""]
    assert row["sure"]
    assert [row[key] for key in ("seconds", "min", "median")] == pytest.approx([6, 1, 2])
    assert "~" not in timing.text()
    assert device.waits == 0


def test_the_end_of_a_prompt_waits_for_the_device(timing, clock, device, caplog):
    with in_prompt("a"), timing.span("denoise", device=CUDA):
        device.works(3)
    assert device.waits == 0
    (text,) = printed(caplog, "a")
    assert device.waits > 0
    assert "  denoise      1    3.000" in text.splitlines()


def test_a_failed_device_leaves_the_seconds_of_the_host(timing, clock, device, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(FakeEvent, "query", fail)
    with timing.span("denoise", device=CUDA):
        clock.passes(2)
    assert rows(timing)["denoise", ""]["seconds"] == 2


def test_no_event_is_recorded_without_cuda(timing, clock, device):
    for each in (None, torch.device("cpu"), torch.device("meta")):
        with timing.span("load", device=each):
            clock.passes(1)
    assert device.queue == []
    assert rows(timing)["load", ""]["seconds"] == 3


def test_events_are_on_the_current_stream_unless_captured(timing, monkeypatch):
    recorded, capturing = [], False

    def event(*, enable_timing):
        assert enable_timing
        return types.SimpleNamespace(record=recorded.append)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert timing.instant(CUDA).event is not None
    capturing = True
    assert timing.instant(CUDA).event is None
    assert recorded == ["stream of cuda:0"]


def test_an_event_error_does_not_hide_the_device_error(timing, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: of the event")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    with pytest.raises(RuntimeError, match="of the work"), timing.span("denoise", device=CUDA):
        raise RuntimeError("CUDA error: of the work")
    assert rows(timing)["denoise", ""]["count"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="events need a CUDA device")
def test_a_real_device_measures_its_own_seconds(timing):
    torch.cuda.synchronize()
    with timing.span("denoise", device=CUDA):
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
    assert not rows(timing)["denoise", ""]["sure"]
    torch.cuda.synchronize()
    row = rows(timing)["denoise", ""]
    assert row["sure"]
    assert 0.2 < row["seconds"] < 5


def test_a_measured_prompt_is_printed_once_at_its_end(timing, clock, caplog):
    with in_prompt("a"), timing.span("load"):
        clock.passes(1)
    with in_prompt("b"):
        assert timing.text() == "Fast Video VAE: no time was measured"
    with in_prompt("a"):
        assert timing.text().startswith("Fast Video VAE: 1.000 s measured of 1.000 s\n")
    assert not printed(caplog, "b")
    (text,) = printed(caplog, "a", "a")
    assert text.startswith("Fast Video VAE: 1.000 s measured of 1.000 s\n")


def test_the_provider_is_registered_during_measured_prompts_only(timing):
    from comfy_execution.cache_provider import _has_cache_providers

    with timing.span("load"):
        pass
    assert not _has_cache_providers()
    with in_prompt("a"):
        timing.text()
        assert not _has_cache_providers()
        with timing.span("load"):
            pass
        assert _has_cache_providers()
    end("a")
    assert not _has_cache_providers()


@pytest.mark.parametrize("off", ["0", " OFF "])
def test_the_environment_variable_turns_off_printing_only(timing, monkeypatch, caplog, off):
    monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", off)
    with in_prompt("a"):
        with timing.span("load"):
            pass
        assert "load" in timing.text()
    assert not printed(caplog, "a")


def test_json_is_one_line_with_the_figures_of_the_table(timing, clock, monkeypatch, caplog):
    monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", "json")
    with in_prompt("a"):
        for length in (1, 3):
            with timing.span("denoise", "high noise"):
                clock.passes(length)
        line = timing.report().json()
    assert printed(caplog, "a") == [line]
    assert "\n" not in line
    row = {
        "kind": "denoise", "label": "high noise", "count": 2, "seconds": 4, "min": 1, "median": 2,
        "sure": True,
    }  # fmt: skip
    expected = {"prompt": "a", "wall": 4, "measured": 4, "stopped": "", "rows": [row]}
    assert json.loads(line) == expected


def test_a_failed_piece_is_measured_and_marked(timing, clock):
    from comfy.model_management import InterruptProcessingException

    def fail(error):
        clock.passes(1)
        raise error

    for error, mark in ((RuntimeError("no"), "failed"), (KeyboardInterrupt(), "interrupted")):
        with pytest.raises(type(error)), timing.span("denoise"), timing.span("switch"):
            fail(error)
        assert timing.text().splitlines()[0].endswith(f" s ({mark})")
    with pytest.raises(InterruptProcessingException), timing.span("denoise"):
        raise InterruptProcessingException
    assert timings(timing)["stopped"] == "interrupted"
    assert rows(timing)["switch", ""]["seconds"] == 2


def test_a_handled_error_leaves_no_mark(timing):
    with timing.span("VAE decode"), pytest.raises(MemoryError), timing.span("load"):
        raise MemoryError
    assert timings(timing)["stopped"] == ""


def test_a_closed_generator_has_not_failed(timing, clock):
    def pieces():
        with timing.span("VAE decode"):
            while True:
                clock.passes(1)
                yield

    drawn = pieces()
    next(drawn)
    drawn.close()
    assert timings(timing)["stopped"] == ""
    assert rows(timing)["VAE decode", ""]["seconds"] == 1


def test_a_thread_without_the_context_measures_separately(timing, clock):
    def work():
        with timing.span("file"):
            clock.passes(1)
        texts.append(timing.text())

    texts = []
    with in_prompt("a"), timing.span("VAE decode"):
        in_thread(work)
        assert "file" in texts[0]
    with in_prompt("a"):
        assert list(rows(timing)) == [("VAE decode", "")]


def test_a_thread_with_the_context_measures_for_the_prompt(timing, clock):
    def work():
        with timing.span("file"):
            clock.passes(1)

    with in_prompt("a"):
        context = contextvars.copy_context()
        with timing.span("VAE decode"):
            in_thread(lambda: context.run(work))
        # It ran in parallel with the other: nothing is subtracted.
        assert lengths(timing) == {"VAE decode": 1, "file": 1}


def test_no_piece_is_lost_with_many_threads(timing):
    def work():
        for _ in range(200):
            with timing.span("file"):
                pass

    with in_prompt("a"):
        contexts = [contextvars.copy_context() for _ in range(8)]
        threads = [threading.Thread(target=context.run, args=[work]) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rows(timing)["file", ""]["count"] == 1600


def test_uncollected_timings_are_bounded(timing):
    for count in range(timing._MOST_OUTSIDE + 10):
        with timing.span("load", str(count)):
            pass
    assert len(rows(timing)) == timing._MOST_OUTSIDE
    for count in range(20):
        with in_prompt(str(count)), timing.span("load"):
            pass
    assert list(timing._prompts) == ["16", "17", "18", "19"]


def test_draws_are_measured_without_the_work_between_them(timing, clock):
    def items():
        for seconds in (1, 2, 3):
            clock.passes(seconds)
            yield seconds

    with timing.span("file"):
        for _ in timing.drawn("VAE decode", items()):
            clock.passes(10)
    found = rows(timing)
    assert found["file", ""]["seconds"] == 30
    row = found["VAE decode", ""]
    assert [row[key] for key in ("count", "seconds", "min", "median")] == [3, 6, 1, 2]


def test_draws_close_their_source_and_pass_its_error_on(timing):
    closed = []

    def items():
        try:
            yield 1
            raise OSError("gone")
        finally:
            closed.append(True)

    drawn = timing.drawn("file", items())
    next(drawn)
    drawn.close()
    assert closed == [True]
    assert timings(timing)["stopped"] == ""
    with pytest.raises(OSError, match="gone"):
        list(timing.drawn("file", items()))
    assert timings(timing)["stopped"] == "failed"
    assert rows(timing)["file", ""]["count"] == 3


@pytest.mark.parametrize("ends_in_a_node", [False, True])
@pytest.mark.parametrize("handled", [False, True], ids=["no error", "handled error"])
def test_only_an_incomplete_prompt_is_marked(timing, caplog, ends_in_a_node, handled):
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.progress import get_progress_state, reset_progress_state

    reset_progress_state("a", DynamicPrompt({}))
    get_progress_state().start_progress("1")
    with in_prompt("a"), contextlib.suppress(MemoryError), timing.span("load"):
        if handled:
            raise MemoryError
    if not ends_in_a_node:
        get_progress_state().finish_progress("1")
    (text,) = printed(caplog, "a")
    mark = " (failed)" if handled else " (stopped)"
    assert text.splitlines()[0].endswith(mark) == ends_in_a_node
    assert ("(" in text) == ends_in_a_node


def test_a_span_costs_less_than_20_microseconds(timing):
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        with in_prompt("a"):
            for _ in range(200):
                with timing.span("denoise", "high noise"):
                    pass
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 20e-6
