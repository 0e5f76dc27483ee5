"""Upscale Video (Fast) in a running ComfyUI: stopped, killed, and its memory."""

import json
import subprocess
import time

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.nodes.checkout import why_unavailable
from fast_video_vae.tests.nodes.server import PromptError, Workflow
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.videos import moving_clip, write
from fast_video_vae.vae.media import Audio

av = pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = pytest.mark.comfyui

FOLDER = "unfinished upscales"


def give_clip(server, name, frames):
    sound = Audio(torch.sin(torch.arange(44100 * frames // 16) / 20)[None] * 0.5, 44100)
    server.input.mkdir(parents=True, exist_ok=True)
    write(server.input / name, moving_clip(frames, 16, 16), 16, codec="ffv1", audio=sound)
    save_file(random_seedvr2(), server.models("vae") / "seedvr2.safetensors")


def upscaling(name, **more):
    """A prompt, and its node that upscales."""
    workflow = Workflow()
    inputs = {
        "video": workflow.add("LoadVideo", file=name),
        "model": workflow.add("Test_SeedVR2"),
        "vae": workflow.load("seedvr2.safetensors"),
    }
    widgets = {"multiplier": 1.0, "shorter_side": 0, "seed": 1, "window": 13, "overlap": 1}
    widgets |= {"cuts": "auto", "color": "lab", "codec": "h264", "quality": 70}
    widgets |= {"filename_prefix": "up", "save_to": "output"}
    node, _ = workflow.add("FastVAE_UpscaleVideo", **inputs, **(widgets | more))
    return workflow, node


def until_parts(server, count):
    """Wait until a run has finished a number of parts."""
    end = time.monotonic() + 120
    while len([*server.output.glob(f"{FOLDER}/*/0*.mp4")]) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def run_again(server, workflow, node):
    """Run a prompt whose results ComfyUI has forgotten, and return its file."""
    server.post("/free", unload_models=True, free_memory=True)
    time.sleep(1.5)
    (file,) = server.files(server.run(workflow)[node])
    return file


def test_a_stopped_prompt_goes_on_and_says_how_long(server):
    give_clip(server, "up.mkv", 70)
    workflow, node = upscaling("up.mkv")
    events = server.events
    prompt = server.queue(workflow)
    until_parts(server, 2)
    server.post("/interrupt")
    with pytest.raises(PromptError) as stopped:
        server.wait(prompt)
    assert stopped.value.interrupted
    file = run_again(server, workflow, node)
    assert "going on after frame" in server.log()
    texts = [event.data["text"] for event in events.all("text")]
    assert any("of 70 frames" in text and " left: " in text for text in texts)
    with av.open(str(file)) as container:
        assert len([*container.decode(video=0)]) == 70
        assert json.loads(container.metadata["prompt"])[node]["class_type"]
        assert container.streams.audio
    assert not (server.output / FOLDER).exists()


@pytest.mark.slow
def test_a_killed_server_goes_on_to_the_same_file(start_server):
    with start_server() as server:
        give_clip(server, "up.mkv", 190)
        workflow, node = upscaling("up.mkv")
        (file,) = server.files(server.run(workflow)[node])
        expected = file.read_bytes()
        for parts in (0, 1, 4, 9, 15):
            server.post("/free", unload_models=True, free_memory=True)
            time.sleep(1.5)
            server.queue(workflow)
            until_parts(server, parts)
            time.sleep(0.03 * parts)  # in the middle of something
            server._process.kill()
            server.stop()
            server.start()
            found = run_again(server, workflow, node)
            assert found != file
            assert found.read_bytes() == expected
            assert not (server.output / FOLDER).exists()


# Upscales a number of frames of 16 x 16 pixels; prints the most MiB that it used.
PEAK = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fast_video_vae.tests.nodes.checkout import import_comfyui
base, count = Path(sys.argv[1]), int(sys.argv[2])
import_comfyui(base)
import folder_paths
from fast_video_vae.tests.nodes.upscale.graph import upscale
from fast_video_vae.tests.nodes.upscale.models import seedvr2_model
from fast_video_vae.tests.nodes.vae.pairs import accelerated, narrow_seedvr2
from fast_video_vae.tests.nodes.video.clips import from_file
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.vae.media import read_video
folder_paths.output_directory = str(base)
options = {"multiplier": 1.0, "window": 21, "overlap": 1}
with torch.inference_mode():
    vae = accelerated(narrow_seedvr2(random_seedvr2()))
    path = upscale(from_file(base / "in.mkv"), seedvr2_model(), vae, **options)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
assert read_video(path).estimated_frames == count
print(peak)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_frames(tmp_path):
    pytest.importorskip("resource", reason="this system does not tell the peak of a process")
    if reason := why_unavailable():
        pytest.skip(reason)
    peaks = []
    for frames in (129, 513):
        base = tmp_path / str(frames)
        base.mkdir()
        sound = Audio(torch.zeros(2, 3000 * frames), 48000)
        write(base / "in.mkv", moving_clip(frames, 16, 16), 16, codec="ffv1", audio=sound)
        command = script_command(PEAK, base, frames)
        done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(float(done.stdout.splitlines()[-1]))
    # The sound alone of 513 frames would be 9 MiB more.
    assert peaks[1] - peaks[0] < 20
