"""A user's installation from nothing: the published archive, an environment, a first workflow."""

import shutil

import pytest
import torch

from fast_video_vae.tests.nodes.checkout import find_comfyui, where_looked
from fast_video_vae.tests.nodes.server import Server, Workflow
from fast_video_vae.tests.tools import environments
from fast_video_vae.tests.tools.environments import FOLDER, torch_of
from fast_video_vae.tests.tools.publish import publish_zip

pytestmark = [pytest.mark.comfyui, pytest.mark.nightly]


def test_the_demo_runs_after_a_fresh_installation(tmp_path):
    """torch, ComfyUI's requirements and then the pack's, as an installer does it."""
    if find_comfyui() is None:
        pytest.skip(where_looked())
    publish_zip(tmp_path / "pack.zip")
    pack = tmp_path / "custom_nodes" / FOLDER
    shutil.unpack_archive(tmp_path / "pack.zip", pack)
    python = environments.new_environment(tmp_path / "venv")
    environments.pip(python, f"torch=={torch.__version__.partition('+')[0]}")
    environments.install_comfyui(python, find_comfyui())
    version = torch_of(python)
    environments.pip(python, "-r", pack / "requirements.txt")
    with Server(tmp_path, python=python, pack=None) as server:
        workflow = Workflow()
        vae = workflow.load()
        latent = workflow.add("FastVAE_Encode", pixels=workflow.add("FastVAE_DemoClip"), vae=vae)
        video = workflow.add("FastVAE_Decode", samples=latent, vae=vae)
        sink, _ = workflow.add("SaveImage", images=video, filename_prefix="demo")
        assert server.pictures(server.run(workflow)[sink]).any()
        assert f"pytorch version: {version}" in server.boot_log
    assert torch_of(python) == version
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # gigabytes
