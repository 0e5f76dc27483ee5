"""The times that nodes measure, and when a running ComfyUI prints them."""

import re
import shutil
import time
import types

import pytest
import torch

from fast_video_vae.tests.nodes.host.clocks import in_thread, rows, timings
from fast_video_vae.tests.nodes.server import AUTO, VAE_FILE, VIDEO, PromptError, Workflow
from fast_video_vae.tests.nodes.vae.pairs import ours

pytestmark = pytest.mark.comfyui


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
