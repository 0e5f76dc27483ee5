"""Publication to ComfyUI's registry: the metadata, and the archive."""

import re
import sys

import pytest

from fast_video_vae.tests.builders import pyproject, succeeded
from fast_video_vae.tests.nodes.checkout import PACK
from fast_video_vae.tests.tools.publish import published_files

# The rules of the registry's `comfy node validate`: no exec, eval, or `;` between statements.
RULES = "S102,S307,E702"

# In the root of the archive, next to __init__.py.
DOCUMENTS = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "requirements.txt"}
PACKAGES = ("kernels", "lora", "nodes", "vae")
DATA = (
    "kernels/csrc/**/*.*",
    "vae/demo/*.*",
    "vae/streaming/prepared/*.safetensors",
    "docs/*.md",
    "web/docs/**/*.md",
    "locales/*/*.json",
    "example_workflows/*.json",
    "subgraphs/*.json",
)


@pytest.fixture(scope="module")
def project():
    return pyproject()


def test_every_address_matches_pyproject(project):
    urls, comfy = project["project"]["urls"], project["tool"]["comfy"]
    owner, name = re.fullmatch(
        r"https://github\.com/([\w-]+)/([\w-]+)", urls["Repository"]
    ).groups()
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    assert comfy["PublisherId"] == owner
    raw = f"https://raw.githubusercontent.com/{owner}/{name}/main/"
    for key in ("Icon", "Banner"):
        assert comfy[key].startswith(raw)
        assert (PACK / comfy[key].removeprefix(raw)).is_file()
    workflow = (PACK / ".github/workflows/publish.yml").read_text(encoding="utf-8")
    assert f"github.repository_owner == '{owner}'" in workflow
    readme = (PACK / "README.md").read_text(encoding="utf-8")
    assert f"git clone {urls['Repository']}\n" in readme


def test_the_manager_shows_the_pack_as_supported(project):
    """The registry reads system and accelerator from classifiers, and drops lists it cannot read.

    One unknown entry empties a list. Only names that PyPI has, too, let setuptools build the pack.
    """
    known = {"Operating System": {"OS Independent"}}
    found: dict[str, set[str]] = {}
    for classifier in project["project"]["classifiers"]:
        kind, _, value = classifier.partition(" :: ")
        found.setdefault(kind, set()).add(value)
    assert {kind: found.get(kind) for kind in known} == known
    # With one kind of GPU the Manager calls the pack unsupported on machines with another.
    assert not found.get("Environment")
    # Further limits on the user's machine: optional, but parseable if given.
    assert re.fullmatch(r">=\d+\.\d+\.\d+", project["tool"]["comfy"]["requires-comfyui"])
    assert re.fullmatch(r">=3\.\d+", project["project"]["requires-python"])
    needed = project["project"]["dependencies"]
    assert not [name for name in needed if name.startswith("comfyui-frontend-package")]


def test_the_icon_is_small_and_square_and_the_banner_wide(project):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    shapes = {}
    for key in ("Icon", "Banner"):
        path = PACK / "media" / project["tool"]["comfy"][key].rpartition("/")[2]
        with image.open(path) as picture:
            shapes[key] = picture.size
    assert shapes["Icon"] == (400, 400)
    assert shapes["Banner"][0] * 9 == shapes["Banner"][1] * 21


def test_the_archive_has_only_files_of_the_pack():
    sources = [
        *PACK.glob("*.py"),
        *(path for name in PACKAGES for path in (PACK / name).rglob("*.py")),
    ]
    needed = [*sources, *(path for pattern in DATA for path in PACK.glob(pattern))]
    workflows = [path for path in needed if path.parent.name == "example_workflows"]
    assert workflows
    needed += [path.with_suffix(".jpg") for path in workflows]
    expected = {path.relative_to(PACK).as_posix() for path in needed if path.is_file()} | DOCUMENTS
    assert {path.as_posix() for path in published_files()} == {
        name for name in expected if "__pycache__" not in name
    }


def test_published_code_has_no_exec_eval_or_semicolons():
    pytest.importorskip("ruff", reason="the rules of the registry are ruff's")
    sources = [str(path) for path in published_files() if path.suffix == ".py"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--no-cache"]
    succeeded([*command, "--select", RULES, *sources], cwd=PACK)
