"""The installation: content of the wheel, dependencies, and an import without side effects."""

import importlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from fast_video_vae.tests.builders import pyproject, succeeded

ROOT = Path(__file__).resolve().parents[1]
DEMO_LIMIT_BYTES = 5_000_000


@pytest.fixture(scope="module")
def project():
    return pyproject()["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy, so that nothing is written here."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools 77")
    tree, out = tmp_path_factory.mktemp("tree") / "clone", tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "venv")
    shutil.copytree(ROOT, tree, ignore=ignore)
    code = f"import setuptools.build_meta as build; build.build_wheel({str(out)!r})"
    succeeded([sys.executable, "-c", code], cwd=tree)
    (path,) = out.glob("fast_video_vae-*.whl")
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_the_wheel_has_every_source_and_nothing_else(wheel):
    folders = ("kernels", "lora", "nodes", "vae")
    sources = [
        *ROOT.glob("*.py"),
        *(path for name in folders for path in (ROOT / name).rglob("*.py")),
    ]
    expected = {f"fast_video_vae/{path.relative_to(ROOT).as_posix()}" for path in sources}
    assert {name for name in wheel if name.endswith(".py")} == expected
    assert not [name for name in wheel if "tests/" in name]


def test_the_wheel_includes_the_demo(wheel):
    demo = {
        name: size for name, size in wheel.items() if name.startswith("fast_video_vae/vae/demo/")
    }
    suffixes = {Path(name).suffix for name in demo}
    assert {".safetensors", ".mp4"} <= suffixes
    assert sum(demo.values()) <= DEMO_LIMIT_BYTES


def test_the_wheel_includes_the_sources_of_native_kernels(wheel):
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels/csrc").rglob("*.*")}
    assert {name for name in wheel if "/csrc/" in name} == {
        f"fast_video_vae/{name}" for name in sources
    }
    assert {Path(name).suffix for name in sources} == {".cpp", ".cu", ".cuh", ".h"}


def test_no_installer_replaces_the_users_torch(project):
    required = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert required == project["dependencies"] == ["einops", "safetensors"]
    extras = project["optional-dependencies"].values()
    everything = [*required, *(line for extra in extras for line in extra)]
    assert not [line for line in everything if re.search(r"[<>~!=]=?\d|===", line)], "no pins"


def test_the_changelog_has_this_version(project):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{project['version']}]" in changelog


def test_comfyui_finds_the_pack_and_imports_nothing_else(tmp_path):
    """ComfyUI imports a pack under the path of its folder and asks it for nodes."""
    code = (
        "import importlib.util as util, sys\n"
        f"name = {str(tmp_path / 'ComfyUI-FastVideoVAE')!r}.replace('.', '_x_')\n"
        f"spec = util.spec_from_file_location(name, {str(ROOT / '__init__.py')!r})\n"
        "sys.modules[name] = pack = util.module_from_spec(spec)\n"
        "before = set(sys.modules)\n"
        "spec.loader.exec_module(pack)\n"
        "print(hasattr(pack, 'comfy_entrypoint'), sorted(set(sys.modules) - before))\n"
    )
    assert succeeded([sys.executable, "-I", "-B", "-c", code]).stdout.strip() == "True []"


@pytest.mark.parametrize("door", ["lora", "vae", "vae.bench"])
def test_every_public_name_is_there(door):
    module = importlib.import_module(f"fast_video_vae.{door}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
