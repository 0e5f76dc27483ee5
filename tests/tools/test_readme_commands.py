"""The script that runs the README's commands: which commands, which Pythons, whose torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from fast_video_vae.tests.tools import readme_commands

README = (readme_commands.ROOT / "README.md").read_text(encoding="utf-8")


def test_the_commands_match_the_readme():
    found = readme_commands.commands(README)
    assert found.keys() == {"demo", "test"}
    assert found["demo"].endswith("fast-video-vae demo")
    for wrong in ("", README + README):
        with pytest.raises(ValueError, match=r"README.md has [02] lines .*; expected one"):
            readme_commands.commands(wrong)


def test_a_python_that_is_missing_is_an_error():
    command = [sys.executable, readme_commands.__file__, "--python", "3.99", "--only", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "there is no Python 3.99 here" in done.stderr


@pytest.mark.slow
def test_torch_is_linked_with_its_dependencies_only(tmp_path):
    base = Path(sys.prefix)
    if sys.platform != "linux" or base == Path(sys.base_prefix):
        pytest.skip("torch is not in a venv of Linux")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    readme_commands.link_torch(tmp_path / "venv", base)
    code = (
        "import importlib.metadata, torch; assert torch.ones(2).sum() == 2; "
        "importlib.metadata.version('torch'); print(torch.__version__)"
    )
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", code], capture_output=True, text=True, check=True
    )
    import torch

    assert done.stdout.strip() == torch.__version__
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not (packages / "pytest").exists()
    assert not list(packages.glob("setuptools*"))
