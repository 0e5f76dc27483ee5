"""Timing of a prompt: the measured pieces, their table, and when a running ComfyUI prints it."""

import contextvars
import json
import logging
import re
import shutil
import threading
import time
import types
from unittest.mock import Mock

import pytest
import torch

from fast_video_vae.tests.nodes.server import AUTO, VAE_FILE, VIDEO, PromptError, Workflow

pytestmark = pytest.mark.comfyui

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NOTHING = "Fast Video VAE: no time was measured"


class Clock:
    """A clock that only advances on request, and a device with twice its seconds."""

    def __init__(self):
        self.seconds, self.waits = 100.0, 0

    def __call__(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds

    def event(self, enable_timing):
        """Return what the timing uses of a `torch.cuda.Event`."""
        event = types.SimpleNamespace(at=None)

        def synchronize():
            self.waits += 1
            if event.at is None:
                raise RuntimeError("the event is not recorded")

        event.record = lambda stream: vars(event).update(at=self.seconds)
        event.synchronize = synchronize
        event.elapsed_time = lambda last: 2e3 * (last.at - event.at)
        return event


@pytest.fixture
def timing(comfyui):
    """The timing module without measurements; the tests are within a prompt, "a"."""
    from comfy_execution import cache_provider
    from comfy_execution.utils import CurrentNodeContext

    from fast_video_vae.nodes.host import timing

    finish("of an earlier test")
    with CurrentNodeContext("a", "1"):
        yield timing
    finish("a")
    assert not timing._running
    assert not cache_provider._has_cache_providers()


@pytest.fixture
def clock(timing, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "clock", clock)
    # Compilations of other tests are at other times of day.
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(time=clock))
    monkeypatch.setattr("torch.cuda.Event", clock.event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: device)
    return clock


def finish(prompt):
    """Notify the providers of caches, as ComfyUI does at the end of every prompt."""
    from comfy_execution.cache_provider import _get_cache_providers

    for provider in [*_get_cache_providers()]:
        provider.on_prompt_end(prompt)


@pytest.fixture
def logged(timing, caplog):
    """End a prompt, and return what it logs."""

    def ended(prompt="a"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            finish(prompt)
        return [record.getMessage() for record in caplog.records if "timing" in record.name]

    return ended


@pytest.fixture
def measured(logged, monkeypatch):
    """End the prompt, and return the report that it logs as JSON, and the seconds of each kind."""

    def ended():
        monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", "json")
        report = json.loads(logged()[-1])
        return report, {row["kind"]: row["seconds"] for row in report["rows"]}

    return ended


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_a_table_has_the_rows_in_the_order_of_the_work_and_is_logged_once(timing, clock, logged):
    assert timing.text() == NOTHING
    pieces = [("of another pack", "", 1.0), ("denoise", "high noise", 2.0)]
    pieces += [("denoise", "high noise", 1.0), ("denoise", "low noise", 3.0)]
    pieces += [("load", "wan.safetensors", 10.0), ("denoise", "high noise", 1.5)]
    for kind, label, length in pieces:
        with timing.span(kind, label):
            clock.passes(length)
        clock.passes(0.125)
    table = [
        "Fast Video VAE: 18.500 s measured of 19.125 s",
        "                                    count  seconds    min  median",
        "  load             wan.safetensors      1   10.000",
        "  denoise          high noise           3    4.500  1.000   1.500",
        "  denoise          low noise            1    3.000",
        "  of another pack                       1    1.000",
    ]
    assert timing.text().splitlines() == table
    assert [line.splitlines() for line in logged()] == [table]
    assert logged() == []


def test_inner_pieces_are_subtracted_from_outer_ones(timing, measured):
    for pieces, expected in (
        (
            [("file", 6, 6.5), ("load", 1, 6.5), ("compile", 8.5, 8.75), ("VAE decode", 0, 8.75)],
            {"VAE decode": 3, "load": 5, "compile": 0.25, "file": 0.5},
        ),
        ([("file", 0, 2), ("VAE decode", 1, 3)], {"file": 2, "VAE decode": 2}),  # they overlap
        # Nested pieces of one row count once.
        ([("file", 3, 7), ("load", 1, 7), ("load", 0, 7)], {"load": 3, "file": 4}),
    ):
        for kind, first, last in pieces:
            timing.add(kind, timing.Instant(first), timing.Instant(last))
        assert measured()[1] == expected


def test_a_device_measures_its_own_seconds_and_waits_for_the_table_alone(
    timing, clock, measured, monkeypatch
):
    def measure(kind, device, seconds):
        with timing.span(kind, device=device):
            clock.passes(seconds)

    for given in (("denoise", CUDA, 3), ("denoise", CUDA, 1), ("load", CPU, 5)):
        measure(*given)
    monkeypatch.setattr("torch.cuda.current_stream", Mock(side_effect=RuntimeError("it failed")))
    measure("file", CUDA, 2)  # by the host
    assert clock.waits == 0
    report, seconds = measured()
    assert seconds == {"load": 5, "denoise": 8, "file": 2}
    row = {"kind": "denoise", "label": "", "count": 2, "seconds": 8, "min": 2, "median": 4}
    assert row in report.pop("rows")
    assert report == {"prompt": "a", "wall": 11, "measured": 15, "stopped": ""}


def test_nothing_is_logged_if_turned_off_or_the_end_is_not_reported(timing, monkeypatch, logged):
    with timing.span("load"):
        pass
    assert logged("another") == []
    assert timing.text() == NOTHING
    monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", " OFF ")
    with timing.span("load"):
        pass
    assert logged() == []


@pytest.mark.parametrize(("error", "mark"), [(RuntimeError, "failed"), (None, "interrupted")])
def test_a_failed_piece_is_measured_and_marked(timing, clock, measured, error, mark):
    from comfy.model_management import InterruptProcessingException

    error = error or InterruptProcessingException
    with timing.span("VAE decode"), pytest.raises(MemoryError), timing.span("load"):
        raise MemoryError
    assert timing.text().splitlines()[0].endswith(" s")  # the error was handled

    def fail():
        with timing.span("denoise"), timing.span("switch"):
            clock.passes(1)
            raise error

    with pytest.raises(error):
        fail()
    assert timing.text().splitlines()[0].endswith(f" s ({mark})")
    report, seconds = measured()
    assert (report["stopped"], seconds["switch"]) == (mark, 1)


def test_a_thread_measures_for_the_prompt_whose_context_it_has(timing, clock, measured):
    def work(kind):
        with timing.span(kind):
            clock.passes(1)

    with timing.span("VAE decode"):
        in_thread(work, "load")
        in_thread(contextvars.copy_context().run, work, "file")
    # It ran in parallel with the other: nothing is subtracted.
    assert measured()[1] == {"VAE decode": 2, "file": 1}


def test_draws_are_measured_without_the_work_between_them(timing, clock, measured):
    def items():
        for length in (1, 2, 3):
            clock.passes(length)
            yield length
        raise OSError("gone")

    drawn = timing.drawn("VAE decode", items())
    with timing.span("file"):
        for _ in range(2):
            next(drawn)
            clock.passes(10)
    drawn.close()
    assert "(" not in timing.text().splitlines()[0]
    with pytest.raises(OSError, match="gone"):
        list(timing.drawn("load", items()))
    report, seconds = measured()
    assert (report["stopped"], seconds) == ("failed", {"VAE decode": 3, "file": 20, "load": 6})


def test_kernel_builds_and_compilations_are_subtracted_from_the_outer_piece(timing, measured):
    import torch._dynamo

    from fast_video_vae import kernels

    def build(label):
        with kernels.preparing("kernel build", label):
            time.sleep(0.02)

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    with timing.span("denoise"):
        doubled(torch.ones(2))
        build("CPU kernels")
        in_thread(build, "of another thread")
    build("after")
    report, seconds = measured()
    named = [(row["kind"], row["label"]) for row in report["rows"]]
    assert named == [("compile", ""), ("kernel build", "CPU kernels"), ("denoise", "")]
    assert 0.02 <= seconds["kernel build"] <= report["wall"] - 0.02  # the other thread's is outer
    assert report["measured"] == pytest.approx(report["wall"], abs=0.01)
    torch._dynamo.reset()


# The first line of a table in a server's log.
TOTALS = re.compile(r"Fast Video VAE: ([\d.]+) s measured of ([\d.]+) s(.*)$", re.MULTILINE)


def test_the_log_has_one_table_per_prompt_over_http(server):
    folder, before = server.models("vae"), len(server.log())
    own = shutil.copy(folder / VAE_FILE, folder / "timed.safetensors").name  # not in any cache
    workflow = Workflow()
    inputs = {"samples": workflow.latent(16, 5), "vae": workflow.load(own)}
    written, _ = workflow.add("FastVAE_DecodeVideo", **inputs, **VIDEO)
    shown, _ = workflow.add("PreviewAny", source=[written, 1])
    (text,) = server.run(workflow)[shown]["text"]
    assert re.search(rf"^ *load +{own}.*^ *VAE decode.*^ *file", text, re.MULTILINE | re.DOTALL)
    (total,) = TOTALS.finditer(server.log()[before:])
    assert 0 < float(total[1]) <= float(total[2]) + 0.001
    assert total[3] == ""
    before = len(server.log())
    vae = workflow.add("FastVAE_Load", vae_name=VAE_FILE, **AUTO | {"chunk": 7})
    latent = workflow.add("EmptyLatentImage", width=64, height=64, batch_size=1)  # 4 channels
    workflow.add("PreviewImage", images=workflow.add("FastVAE_Decode", samples=latent, vae=vae))
    with pytest.raises(PromptError, match="samples: "):
        server.run(workflow)
    log = server.log()[before:]
    (total,) = TOTALS.finditer(log)
    assert total[3] == " (stopped)"
    assert "load" in log[total.start() :]
