"""The video nodes in a running ComfyUI."""

import json

import pytest

from fast_video_vae.tests.nodes.server import VIDEO, Workflow
from fast_video_vae.tests.videos import psnr, stacked
from fast_video_vae.vae import CLIP_PATH

pytestmark = pytest.mark.comfyui


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
