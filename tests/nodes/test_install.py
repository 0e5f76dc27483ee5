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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """ComfyUI's folders with the unpacked archive in `custom_nodes`."""
    if find_comfyui() is None:
        pytest.skip(where_looked())
    base = tmp_path_factory.mktemp("installation")
    publish_zip(base / "pack.zip")
    shutil.unpack_archive(base / "pack.zip", base / "custom_nodes" / FOLDER)
    return base


@pytest.fixture(scope="module")
def python(base):
    """A Python with torch, ComfyUI's requirements and then the pack's, as an installer does it."""
    folder = base / "venv"
    python = environments.new_environment(folder)
    environments.pip(python, f"torch=={torch.__version__.partition('+')[0]}")
    environments.install_comfyui(python, find_comfyui())
    before = torch_of(python)
    environments.pip(python, "-r", base / "custom_nodes" / FOLDER / "requirements.txt")
    assert torch_of(python) == before
    yield python
    shutil.rmtree(folder, ignore_errors=True)  # gigabytes


def test_the_demo_runs_after_a_fresh_installation(base, python):
    version = torch_of(python)
    with Server(base, python=python, pack=None, name=FOLDER) as server:
        (info,) = server.get("/object_info/FastVAE_DemoClip").values()
        assert info["python_module"] == f"custom_nodes.{FOLDER}"
        workflow = Workflow()
        clip = workflow.add("FastVAE_DemoClip")
        vae = workflow.load()
        latent = workflow.add("FastVAE_Encode", pixels=clip, vae=vae)
        video = workflow.add("FastVAE_Decode", samples=latent, vae=vae)
        sink, _ = workflow.add("SaveImage", images=video, filename_prefix="demo")
        files = server.files(server.run(workflow)[sink])
        assert files
        assert all(file.stat().st_size for file in files)
        log = server.log()
    assert f"pytorch version: {version}" in log
    assert not [line for line in log.splitlines() if "IMPORT FAILED" in line and FOLDER in line]
    assert torch_of(python) == version
