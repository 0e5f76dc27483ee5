"""A user's installation from nothing: the published archive, an environment, a first workflow."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.nodes.checkout import find_comfyui, where_looked
from fast_video_vae.tests.nodes.server import Server, Workflow
from fast_video_vae.tests.tools.publish import publish_zip, published_files

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]

# Packages that require torchvision would install another torch, so these are installed without
# dependencies; boot.py replaces what is missing.
TORCH_FAMILY = {"torch", "torchvision", "torchaudio"}
WITHOUT_DEPENDENCIES = {"spandrel", "kornia"}

# Not the name that a clone has: a registry installs into a folder of its own choice.
FOLDER = "some-other-name"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """ComfyUI's folders with the unpacked archive in `custom_nodes`."""
    if find_comfyui() is None:
        pytest.skip(where_looked())
    base = tmp_path_factory.mktemp("installation")
    publish_zip(base / "pack.zip")
    with zipfile.ZipFile(base / "pack.zip") as archive:
        archive.extractall(base / "custom_nodes" / FOLDER)
    return base


@pytest.fixture(scope="module")
def python(base):
    """A Python with torch, ComfyUI's requirements and then the pack's, as an installer does it."""
    folder = base / "venv"
    venv.create(folder, with_pip=True, symlinks=sys.platform != "win32")
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip(python, f"torch=={torch.__version__.partition('+')[0]}")
    lines = (find_comfyui() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    bare = [line for line in requirements if name_of(line) in WITHOUT_DEPENDENCIES]
    apart = TORCH_FAMILY | WITHOUT_DEPENDENCIES
    pip(python, *(line for line in requirements if name_of(line) not in apart))
    if bare:
        pip(python, "--no-deps", *bare)
    before = torch_of(python)
    pip(python, "-r", str(base / "custom_nodes" / FOLDER / "requirements.txt"))
    assert torch_of(python) == before
    yield python
    shutil.rmtree(folder, ignore_errors=True)  # gigabytes


def test_the_archive_has_only_files_that_users_need():
    names = {str(path) for path in published_files()}
    needed = {"__init__.py", "LICENSE", "README.md", "pyproject.toml", "requirements.txt"}
    assert needed <= names
    assert {"nodes/__init__.py", "vae/demo/vae.safetensors", "vae/demo/clip.mp4"} <= names
    assert not [
        name for name in names if re.match(r"tests/|\.ci/|.*(__pycache__|\.egg-info)", name)
    ]


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


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def torch_of(python: Path) -> str:
    """The version and build of torch that a Python has."""
    command = [str(python), "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pip(python: Path, *arguments: str) -> None:
    """Install, or fail with what pip says."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
