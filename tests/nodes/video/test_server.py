"""The video nodes in a running ComfyUI, and the memory that they take."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.nodes.checkout import PACK, why_unavailable
from fast_video_vae.tests.nodes.server import AUTO, PromptError, Server, Workflow
from fast_video_vae.tests.nodes.video.clips import decibels, decode, frames_of

pytestmark = pytest.mark.comfyui

# What a server may use more after a decode: the allocator's leftovers.
SLACK_BYTES = 64 << 20

# Decodes so many latents of 128 x 128 pixels into a file, or encodes that file; prints the MiB that
# it took at most.
PEAK = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fast_video_vae.tests.nodes.checkout import import_comfyui
import_comfyui(Path(sys.argv[1]))
from comfy_api.latest import InputImpl
from fast_video_vae.nodes.vae.nodes import Load
from fast_video_vae.nodes.video.nodes import DecodeVideo, EncodeVideo
file, count = Path(sys.argv[1], "output", "x_00001_.mp4"), int(sys.argv[3])
shape = (1, 16, (count - 1) // 4 + 1, 16, 16)
with torch.inference_mode():
    (vae,) = Load.execute("bundled demo", "auto", "auto", 0).args
    if sys.argv[2] == "decode":
        samples = {"samples": torch.randn(shape)}
        DecodeVideo.execute(samples, vae, 16.0, "h264", 70, "x", "output")
        assert file.is_file()
    else:
        samples, _, frames, _ = EncodeVideo.execute(InputImpl.VideoFromFile(str(file)), vae).args
        assert samples["samples"].shape == shape
        assert frames == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_eight_times_the_frames_take_no_more_memory(tmp_path):
    pytest.importorskip("resource", reason="this system does not tell the peak of a process")
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    for task in ("decode", "encode"):
        few, many = (peak_mib(tmp_path / str(frames), task, frames) for frames in (129, 1025))
        # As an IMAGE 1,025 frames would be 168 MiB more than 129, and as bytes 42 MiB.
        assert many < 1.1 * few
        assert many - few < 30


def peak_mib(base, task, frames):
    """What a process of its own takes."""
    base.mkdir(exist_ok=True)
    command = script_command(PEAK, base, task, frames)
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def film(rate=16.0, **options):
    """The example workflow as the frontend sends it, at so many frames per second."""
    workflow = Workflow()
    clip, _ = workflow.add("FastVAE_DemoClip")
    vae = workflow.add("FastVAE_Load", vae_name="bundled demo", **AUTO)
    latent, _ = workflow.add("FastVAE_EncodeVideo", video=[clip, 1], vae=vae, fps=rate)
    video, _ = workflow.add(
        "FastVAE_DecodeVideo",
        samples=[latent, 0],
        vae=vae,
        fps=[latent, 1],
        audio=[latent, 3],
        **{"codec": "h264", "quality": 70, "filename_prefix": "film", "save_to": "output"},
        **options,
    )
    return workflow, latent, video


def test_the_example_runs_over_http(server):
    import av

    workflow, _, video = film()
    parts, _ = workflow.add("GetVideoComponents", video=[video, 0])
    last = workflow.add("ImageFromBatch", image=[parts, 0], batch_index=32, length=1)
    picture, _ = workflow.add("SaveImage", images=last, filename_prefix="last")
    copy, _ = workflow.add("SaveVideo", video=[video, 0], filename_prefix="copy", format="auto")
    shown = server.run(workflow)
    assert shown[video]["animated"] == [True]
    for kind in (video, copy):
        (file,) = server.files(shown[kind])
        with av.open(str(file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            prompt = json.loads(container.metadata["prompt"])
        assert len(frames) == 33
        assert {each["class_type"] for each in prompt.values()} >= {"FastVAE_DecodeVideo"}
    (file,) = server.files(shown[picture])
    seen, played = torch.from_numpy(np.array(Image.open(file))), torch.from_numpy(frames[-1])
    assert decibels(seen / 255, played / 255) > 40
    (original,) = (PACK / "vae" / "demo").glob("*.mp4")
    with av.open(str(original)) as container:
        source = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert decibels(played / 255, torch.from_numpy(source[-1]) / 255) > 22


def test_a_range_that_is_none_fails_over_http_with_a_line(server):
    workflow, *_ = film(frames="90-")
    with pytest.raises(PromptError, match="frames is '90-'; the video has the frames 0-32"):
        server.run(workflow)


def test_an_interrupt_over_http_frees_the_memory_and_leaves_no_file(server, vae_file):
    def workflow(frames):
        prompt = Workflow()
        size = {"width": 256, "height": 256, "length": frames, "batch_size": 1}
        latent = prompt.add("EmptyHunyuanLatentVideo", **size)
        vae = prompt.add("FastVAE_Load", vae_name=vae_file, **AUTO)
        options = {"fps": 16.0, "codec": "h264", "quality": 70, "save_to": "output"}
        prefix = {"filename_prefix": f"stop/{frames}"}
        prompt.add("FastVAE_DecodeVideo", samples=latent, vae=vae, **options, **prefix)
        return prompt

    server.run(workflow(17))
    used_bytes = server.memory().rss
    error, seconds = server.interrupted(workflow(1001))  # a minute and more
    assert error.interrupted
    assert seconds < 3
    server.run(workflow(5))
    assert server.memory().rss < used_bytes + SLACK_BYTES
    names = sorted(path.name for path in (server.output / "stop").iterdir())
    assert names == [f"{frames}_00001_.mp4" for frames in (17, 5)]


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_part_of_a_file(inference, demo, tmp_path, monkeypatch):
    import folder_paths

    with Server(tmp_path, threads=1) as server:
        workflow, _, video = film(160.0)  # ten times as many frames, to be in the midst of them
        events = server.events
        prompt_id = server.queue(workflow)
        events.wait("progress", timeout_s=240, prompt_id=prompt_id, node=video)
        server.kill()
    assert not list(server.output.glob("*.mp4"))
    monkeypatch.setattr(folder_paths, "output_directory", str(server.output))
    written = decode(*demo, filename_prefix="film")
    assert Path(written.get_stream_source()) == server.output / "film_00001_.mp4"
    assert len(frames_of(written)) == 9
