"""Upscale Video (Fast) in a running ComfyUI: killed, and its memory."""

import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.nodes.server import UPSCALE, Workflow
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.videos import moving_clip, write
from fast_video_vae.vae.media import Audio

av = pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = pytest.mark.comfyui

FOLDER = "unfinished upscales"


def upscaling(server, frames, size=16, **widgets):
    """A prompt for a new clip, and its node that upscales."""
    sound = Audio(torch.sin(torch.arange(44100 * frames // 16) / 20)[None] * 0.5, 44100)
    server.input.mkdir(parents=True, exist_ok=True)
    name = f"{frames}.mkv"
    write(server.input / name, moving_clip(frames, size, size), 16, codec="ffv1", audio=sound)
    save_file(random_seedvr2(), server.models("vae") / "seedvr2.safetensors")
    workflow = Workflow()
    inputs = {
        "video": workflow.add("LoadVideo", file=name),
        "model": workflow.add("Test_SeedVR2"),
        "vae": workflow.load("seedvr2.safetensors"),
    }
    widgets = UPSCALE | {"window": 9, "save_to": "output", "filename_prefix": "up"} | widgets
    node, _ = workflow.add("FastVAE_UpscaleVideo", **inputs, **widgets)
    return workflow, node


def until_parts(server, count):
    """Wait until a run has finished a number of parts."""
    end = time.monotonic() + 120
    while len([*server.output.glob(f"{FOLDER}/*/0*.mp4")]) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def run(server, workflow, node):
    """Run a prompt, and return its file."""
    (file,) = server.files(server.run(workflow, timeout_s=900)[node])
    return file


@pytest.mark.slow
def test_a_killed_server_goes_on_to_the_same_file(start_server):
    with start_server("--cache-none") as server:
        workflow, node = upscaling(server, 45)
        file = run(server, workflow, node)
        expected = file.read_bytes()
        server.queue(workflow)
        until_parts(server, 2)
        server._process.kill()
        server.stop()
        server.start()
        found = run(server, workflow, node)
        assert "going on after frame" in server.log()
        assert found != file
        assert found.read_bytes() == expected
        assert not (server.output / FOLDER).exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count no peak of a process")
def test_memory_does_not_grow_with_the_frames(server):
    peaks, pid = [], server._process.pid
    for frames in (129, 321):  # more than wait for the model
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is that of this run
        workflow, node = upscaling(server, frames, size=64, window=33)
        with av.open(str(run(server, workflow, node))) as container:
            assert len([*container.decode(video=0)]) == frames
        peaks.append(record.process_mib("VmHWM", pid))
    # The frames alone would be 9 MiB more.
    assert peaks[1] - peaks[0] < 7
