"""Timing of a prompt: the measured pieces, their table, and when a running ComfyUI prints it."""

import contextvars
import json
import re
import shutil
import time
import types

import pytest
import torch

from fast_video_vae.tests.nodes.host.clocks import (
    FakeEvent,
    in_prompt,
    in_thread,
    lengths,
    printed,
    rows,
    timings,
)
from fast_video_vae.tests.nodes.server import AUTO, VAE_FILE, VIDEO, PromptError, Workflow
from fast_video_vae.tests.nodes.vae.pairs import ours

pytestmark = pytest.mark.comfyui


CUDA = torch.device("cuda", 0)


def test_the_table_has_a_row_for_every_kind_and_label_in_the_order_of_the_work(timing, clock):
    pieces = [("of another pack", "", 1.0), ("denoise", "high noise", 2.0)]
    pieces += [("denoise", "high noise", 1.0), ("denoise", "low noise", 3.0)]
    pieces += [("load", "wan.safetensors", 10.0), ("denoise", "high noise", 1.5)]
    for kind, label, length in pieces:
        with timing.span(kind, label):
            clock.passes(length)
        clock.passes(0.125)
    assert timing.text().splitlines() == [
        "Fast Video VAE: 18.500 s measured of 19.125 s",
        "                                    count  seconds    min  median",
        "  load             wan.safetensors      1   10.000",
        "  denoise          high noise           3    4.500  1.000   1.500",
        "  denoise          low noise            1    3.000",
        "  of another pack                       1    1.000",
    ]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (
            [("file", 6, 6.5), ("load", 1, 6.5), ("compile", 8.5, 8.75), ("VAE decode", 0, 8.75)],
            {"VAE decode": 3, "load": 5, "compile": 0.25, "file": 0.5},
        ),
        ([("file", 0, 2), ("VAE decode", 1, 3)], {"file": 2, "VAE decode": 2}),
    ],
    ids=["within", "overlap"],
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


def test_a_device_measures_its_own_seconds_without_a_wait(timing, clock, device, caplog):
    with in_prompt("a"):
        for seconds in (3.0, 1.0, 2.0):
            with timing.span("denoise", device=CUDA):
                clock.passes(0.01)
                device.works(seconds)
        row = rows(timing)["denoise", ""]
        assert not row["sure"]
        assert row["seconds"] == pytest.approx(0.03)  # of the host, until the device is done
        assert "~0.030" in timing.text()
        assert "the device is busy" in timing.text()
        assert device.waits == 0
    (text,) = printed(caplog, "a")  # the end of the prompt waits
    assert device.waits > 0
    assert "~" not in text
    assert "  denoise      3    6.000  1.000   2.000" in text.splitlines()


def test_a_failed_device_leaves_the_seconds_of_the_host(timing, clock, device, monkeypatch):
    def fail(message):
        clock.passes(2)
        raise RuntimeError(message)

    monkeypatch.setattr(FakeEvent, "query", lambda _: fail("CUDA error: device-side assert"))
    with pytest.raises(RuntimeError, match="of the work"), timing.span("denoise", device=CUDA):
        fail("CUDA error: of the work")
    assert rows(timing)["denoise", ""]["seconds"] == 2
    device.queue.clear()
    with timing.span("load", device=torch.device("cpu")):
        pass
    assert device.queue == []


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


def test_the_environment_variable_turns_off_printing_only(timing, monkeypatch, caplog):
    monkeypatch.setenv("FAST_VIDEO_VAE_TIMING", " OFF ")
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

    with timing.span("VAE decode"), pytest.raises(MemoryError), timing.span("load"):
        raise MemoryError
    assert timings(timing)["stopped"] == ""  # the error was handled
    for error, mark in (
        (RuntimeError("no"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (InterruptProcessingException(), "interrupted"),
    ):
        with pytest.raises(type(error)), timing.span("denoise"), timing.span("switch"):
            fail(error)
        assert timing.text().splitlines()[0].endswith(f" s ({mark})")
    assert rows(timing)["switch", ""]["seconds"] == 3


def test_a_thread_measures_for_the_prompt_whose_context_it_has(timing, clock):
    def work():
        with timing.span("file"):
            clock.passes(1)
        texts.append(timing.text())

    texts = []
    with in_prompt("a"), timing.span("VAE decode"):
        in_thread(work)
        assert "file" in texts[0]
    with in_prompt("a"):
        assert lengths(timing) == {"VAE decode": 1}
        context = contextvars.copy_context()
        with timing.span("VAE decode"):
            in_thread(lambda: context.run(work))
        # It ran in parallel with the other: nothing is subtracted.
        assert lengths(timing) == {"VAE decode": 2, "file": 1}


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
    closed = []

    def items():
        try:
            for seconds in (1, 2, 3):
                clock.passes(seconds)
                yield seconds
            raise OSError("gone")
        finally:
            closed.append(True)

    drawn = timing.drawn("VAE decode", items())
    with timing.span("file"):
        for _ in range(2):
            next(drawn)
            clock.passes(10)
    drawn.close()
    assert closed == [True]
    assert timings(timing)["stopped"] == ""
    assert lengths(timing) == {"VAE decode": 3, "file": 20}
    with pytest.raises(OSError, match="gone"):
        list(timing.drawn("load", items()))
    assert timings(timing)["stopped"] == "failed"
    assert lengths(timing)["load"] == 6


def test_the_nodes_measure_what_they_do(timing, inference):
    from comfy.model_patcher import ModelPatcher

    from fast_video_vae.nodes.lora.apply import apply_lora

    (vae,) = ours("Load", vae_name="bundled demo").args
    (vae,) = ours("Accelerate", vae=vae, chunk=2).args
    frames, video = ours("DemoClip").args
    ours("Encode", pixels=frames[:5], vae=vae)
    labels = ("bundled demo", "accelerated VAE", "VAE to its device")
    assert {*rows(timing)} == {*(("load", label) for label in labels), ("VAE encode", "")}
    latent, *_ = ours("EncodeVideo", video=video, vae=vae, max_frames=9).args
    found = rows(timing)
    assert found["VAE encode", ""]["count"] == 2
    assert found["file", ""]["count"] > 2  # chunks of the video, and its sound
    _, text = ours("Decode", samples=latent, vae=vae).args
    assert text == timing.text()
    assert rows(timing)["VAE decode", ""]["count"] == 1
    images = torch.zeros(1, 16, 16, 3)  # of a VAE of another pack
    other = types.SimpleNamespace(device=torch.device("cpu"), encode=None, decode=lambda _: images)
    ours("Decode", samples={"samples": torch.zeros(1, 4, 2, 2)}, vae=other)
    assert rows(timing)["VAE decode", ""]["count"] == 2
    cpu = torch.device("cpu")
    apply_lora(ModelPatcher(torch.nn.Linear(2, 2), cpu, cpu), ())
    assert ("LoRA attach", "") in rows(timing)


def test_kernel_builds_and_compilations_are_subtracted_from_the_outer_piece(timing):
    import torch._dynamo

    from fast_video_vae import kernels

    def prepare(label):
        with kernels.preparing("kernel build", label):
            time.sleep(0.02)

    def slow(graph, _):
        time.sleep(0.3)
        return graph.forward

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x * 2, backend=slow)
    prepare("before")
    for _ in range(3):
        with timing.span("denoise"):
            doubled(torch.ones(2))
    with timing.span("VAE decode"):
        prepare("CPU kernels")
        in_thread(lambda: prepare("of another thread"))
    prepare("after")
    found = rows(timing)
    names = [("kernel build", "CPU kernels"), ("compile", ""), ("denoise", ""), ("VAE decode", "")]
    assert {*found} == {*names}
    assert found["kernel build", "CPU kernels"]["seconds"] >= 0.02
    assert found["compile", ""]["count"] == 1
    assert found["compile", ""]["seconds"] >= 0.3
    assert timings(timing)["measured"] == pytest.approx(timings(timing)["wall"], abs=0.01)
    torch._dynamo.reset()


# The first line of a table in a server's log.
TOTALS = re.compile(r"Fast Video VAE: ([\d.]+) s measured of ([\d.]+) s(.*)$", re.MULTILINE)


def logged(server, before):
    return server.log()[len(before) :]


def test_the_log_has_one_table_per_prompt_over_http(server):
    folder = server.models("vae")
    own = shutil.copy(folder / VAE_FILE, folder / "timed.safetensors").name  # not in any cache
    workflow = Workflow()
    inputs = {"samples": workflow.latent(32, 13), "vae": workflow.load(own)}
    decoded, _ = workflow.add("FastVAE_Decode", **inputs)
    written, _ = workflow.add("FastVAE_DecodeVideo", **inputs, **VIDEO)
    shown = [workflow.add("PreviewAny", source=[node, 1])[0] for node in (decoded, written)]
    before = server.log()
    outputs = server.run(workflow)
    texts = [outputs[name]["text"][0] for name in shown]
    assert "VAE decode" in texts[0]
    assert "file" in texts[1]
    for text in texts:
        assert re.search(rf"^ *load +{own}", text, re.MULTILINE)
    log = logged(server, before)
    (total,) = TOTALS.finditer(log)
    measured, wall, mark = total.groups()
    assert 0 < float(measured) <= float(wall) + 0.001
    assert mark == ""
    table = log[total.start() :].splitlines()
    assert [line.split()[0] for line in table[2:6]] == ["load", "load", "VAE", "file"]

    before = server.log()
    again = server.run(workflow)  # all outputs come from the cache
    assert [again[name]["text"][0] for name in shown] == texts
    other = Workflow()  # no node of this pack
    image = other.add("EmptyImage", width=8, height=8, batch_size=1, color=0)
    other.add("PreviewImage", images=image)
    server.run(other)
    assert not TOTALS.search(logged(server, before))


def test_a_failed_prompt_reports_its_timings_over_http(server):
    before, workflow = server.log(), Workflow()
    vae = workflow.add("FastVAE_Load", vae_name=VAE_FILE, **AUTO | {"chunk": 7})
    latent = workflow.add("EmptyLatentImage", width=64, height=64, batch_size=1)  # 4 channels
    decoded = workflow.add("FastVAE_Decode", samples=latent, vae=vae)
    workflow.add("PreviewImage", images=decoded)
    with pytest.raises(PromptError, match="samples: "):
        server.run(workflow)
    log = logged(server, before)
    (total,) = TOTALS.finditer(log)
    assert total[3] == " (stopped)"
    assert "load" in log[total.start() :]
