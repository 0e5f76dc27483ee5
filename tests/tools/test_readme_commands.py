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
    for line in found.values():
        assert README.splitlines().count(line) == 1
    assert found["demo"].endswith("fast-video-vae demo")


@pytest.mark.parametrize("readme", ["", README + README])
def test_a_missing_or_ambiguous_command_is_an_error(readme):
    with pytest.raises(ValueError, match=r"README.md has [02] lines .*; expected one"):
        readme_commands.commands(readme)


def test_a_python_can_be_a_version_a_command_or_a_file():
    assert readme_commands.interpreter(sys.executable) == sys.executable
    assert readme_commands.interpreter("3.99") is None
    assert readme_commands.interpreter("no-such-python") is None


def test_a_requested_python_that_is_missing_is_a_failure(capsys, tmp_path):
    arguments = ["--python", "3.99", "--only", "demo", "--logs", str(tmp_path)]
    assert readme_commands.main(arguments) == 1
    assert "| 3.99 |  |  | no such Python here |  |" in capsys.readouterr().out


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
