"""The video nodes in a running ComfyUI, and their memory."""

import json
import subprocess

import pytest

from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.nodes.checkout import why_unavailable
from fast_video_vae.tests.nodes.server import VIDEO, Workflow
from fast_video_vae.tests.videos import psnr, stacked
from fast_video_vae.vae import CLIP_PATH

pytestmark = pytest.mark.comfyui

# Decodes a number of latents of 128 x 128 pixels to a file, and encodes that file; prints the most
# MiB that it used.
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
file, count = Path(sys.argv[1], "output", "x_00001_.mp4"), int(sys.argv[2])
shape = (1, 16, (count - 1) // 4 + 1, 16, 16)
with torch.inference_mode():
    (vae,) = Load.execute("bundled demo", "auto", "auto", 0).args
    DecodeVideo.execute({"samples": torch.randn(shape)}, vae, 16.0, "h264", 70, "x", "output")
    samples, _, frames, _ = EncodeVideo.execute(InputImpl.VideoFromFile(str(file)), vae).args
    assert samples["samples"].shape == shape
    assert frames == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_frames(tmp_path):
    pytest.importorskip("resource", reason="this system does not tell the peak of a process")
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    peaks = []
    for frames in (97, 449):
        base = tmp_path / str(frames)
        base.mkdir()
        command = script_command(PEAK, base, frames)
        done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(float(done.stdout.splitlines()[-1]))
    # As an IMAGE 449 frames would be 66 MiB more than 97, and as bytes 16 MiB.
    assert peaks[1] - peaks[0] < 14


def test_the_example_runs_over_http(server):
    import av

    workflow = Workflow()
    clip, _ = workflow.add("FastVAE_DemoClip")
    vae = workflow.load()
    latent, _ = workflow.add("FastVAE_EncodeVideo", video=[clip, 1], vae=vae)
    inputs = VIDEO | {"samples": [latent, 0], "vae": vae, "audio": [latent, 3]}
    inputs |= {"fps": [latent, 1], "save_to": "output"}
    video, _ = workflow.add("FastVAE_DecodeVideo", **inputs)
    copy, _ = workflow.add("SaveVideo", video=[video, 0], filename_prefix="copy", format="auto")
    shown = server.run(workflow)
    assert shown[video]["animated"] == [True]
    for kind in (video, copy):
        (file,) = server.files(shown[kind])
        with av.open(str(file)) as container:
            prompt = json.loads(container.metadata["prompt"])
        assert {each["class_type"] for each in prompt.values()} >= {"FastVAE_DecodeVideo"}
        assert psnr(stacked(file), stacked(CLIP_PATH)) > 22
