"""The video nodes in a running ComfyUI, and their memory."""

import json
import sys

import pytest

from fast_video_vae.tests.builders import script_command, succeeded
from fast_video_vae.tests.nodes.server import VIDEO, Workflow
from fast_video_vae.tests.videos import psnr, stacked
from fast_video_vae.vae import CLIP_PATH

pytestmark = pytest.mark.comfyui

# Decodes latents of 128 x 128 pixels to a file, and encodes that file, for some numbers of frames;
# prints the most MiB that each used.
PEAKS = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fast_video_vae.tests.nodes.checkout import import_comfyui
import_comfyui(Path(sys.argv[1]))
from fast_video_vae.nodes.vae.nodes import Load
from fast_video_vae.nodes.video.nodes import DecodeVideo, EncodeVideo
from fast_video_vae.tests.benchmarks.record import process_mib
(vae,) = Load.execute("bundled demo", "auto", "auto", 0).args
for count in (65, 257):
    Path("/proc/self/clear_refs").write_text("5")
    shape = (1, 16, (count - 1) // 4 + 1, 16, 16)
    with torch.inference_mode():
        latent = {"samples": torch.randn(shape)}
        video, _ = DecodeVideo.execute(latent, vae, 16.0, "h264", 70, "x", "output").args
        samples, _, frames, _ = EncodeVideo.execute(video, vae).args
    assert samples["samples"].shape == shape
    assert frames == count
    print(process_mib("VmHWM"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count no peak of a process")
def test_memory_does_not_grow_with_the_frames(available, tmp_path):
    done = succeeded(script_command(PEAKS, tmp_path), cwd=tmp_path)
    first, second = map(float, done.stdout.splitlines()[-2:])
    # As an IMAGE the frames would be 36 MiB more.
    assert second - first < 18


def test_the_example_runs_over_http(server):
    import av

    workflow = Workflow()
    clip, _ = workflow.add("FastVAE_DemoClip")
    vae = workflow.load()
    latent, _ = workflow.add("FastVAE_EncodeVideo", video=[clip, 1], vae=vae, max_frames=9)
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
        assert psnr(stacked(file), stacked(CLIP_PATH)[:9]) > 22
