"""The folder for a machine without a network: only what can run there, and checked by importing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast_video_vae.tests.benchmarks import prepare_gpu
from fast_video_vae.tests.benchmarks.gpu import bare_import, bundle
from fast_video_vae.tests.nodes.checkout import find_comfyui, why_unavailable

HERE = Path(__file__).parent


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of `sys.path`, and a function that writes files of packages there."""
    site = tmp_path / "site"

    def write(*names):
        for name in names:
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")

    site.mkdir()
    monkeypatch.syspath_prepend(site)
    return write


def names_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_package_is_copied_without_caches(installed, tmp_path):
    installed("pure_one/__init__.py", "pure_one/a.py", "pure_one/__pycache__/a.cpython-311.pyc")
    installed("pure_two/part.py")  # without __init__.py
    installed("pure_three.py")
    for name in ("pure_one", "pure_two", "pure_three"):
        assert prepare_gpu.copy_package(name, tmp_path / "to") == f"{name}: 0.0 MiB"
    assert names_in(tmp_path / "to") == [
        "pure_one/__init__.py", "pure_one/a.py", "pure_three.py", "pure_two/part.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["some/__init__.py", "some/_c.cpython-311-x86_64-linux-gnu.so"], "_c.cpython-311"),
        (["some/__init__.py", "some/_c.cp311-win_amd64.pyd"], "_c.cp311-win_amd64.pyd"),
        (["some/__init__.py", "some/_c.abi3.so", "some.libs/libx.so.1"], "of libraries"),
        ([], "not installed"),
    ],
)
def test_a_package_that_cannot_run_there_is_left_out(installed, tmp_path, files, reason):
    installed(*files)
    line = prepare_gpu.copy_package("some", tmp_path / "to")
    assert line.startswith("left out: some, because ")
    assert reason in line
    assert not (tmp_path / "to").exists()


def test_a_module_for_every_python_is_copied(installed, tmp_path):
    installed("some/__init__.py", "some/library.so", "some/_c.abi3.so")
    assert prepare_gpu.copy_package("some", tmp_path / "to") == "some: 0.0 MiB"


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not made by this script"):
        prepare_gpu.make(tmp_path, tmp_path / "no ComfyUI")
    assert names_in(tmp_path) == ["mine.txt"]


def test_a_folder_that_is_too_large_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_gpu, "_PACKAGES", ("zipp", "none_of_this_name"))
    monkeypatch.setattr(prepare_gpu, "_LIMIT_BYTES", 1)
    with pytest.raises(ValueError, match="has 0 MiB; expected at most 0"):
        prepare_gpu.make(tmp_path / "bundle", tmp_path / "no ComfyUI")
    printed = capsys.readouterr().out
    assert "left out: none_of_this_name, because it is not installed here" in printed
    assert "left out: ComfyUI, because" in printed


def test_a_bundle_is_used_after_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    before = [*sys.path]
    bundle.use(tmp_path / "none")
    assert sys.path == before
    assert "COMFYUI_PATH" not in os.environ
    for name in (bundle.PACKAGES, bundle.COMFYUI):
        (tmp_path / name).mkdir()
    bundle.use(tmp_path)
    assert sys.path == [*before, str(tmp_path / bundle.PACKAGES)]
    assert os.environ.pop("COMFYUI_PATH") == str(tmp_path / bundle.COMFYUI)


def test_needed_packages_are_found_through_those_that_need_them():
    found = bare_import.needed_by(["torch"])
    assert {"torch", "sympy", "mpmath", "typing-extensions"} <= found  # sympy needs mpmath
    assert not {"pytest", "diffusers"} & found


@pytest.mark.slow
@pytest.mark.comfyui
def test_comfyui_and_diffusers_are_measured_from_the_bundle(tmp_path):
    if reason := why_unavailable():
        pytest.skip(reason)
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed")
    folder, path = tmp_path / "bundle", tmp_path / "rows.json"
    made = ["prepare_gpu.py", str(folder), "--comfyui", str(find_comfyui())]
    measured = ["bench_gpu.py", "--small", "--only", "vae", "--bundle", str(folder)]
    done = _python(made)
    assert "imports work: comfy.sd, diffusers" in done
    assert "comfy_kitchen is a stub" in done
    environment = {key: value for key, value in os.environ.items() if key != "COMFYUI_PATH"}
    _python([*measured, "--json", str(path)], env=environment)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    wan = [row for row in rows if row["name"].startswith("Wan2.1")]
    found = {row["name"].rpartition(": ")[2]: row["status"] for row in wan}
    assert found == {"ours": "ok", "diffusers": "ok", "comfyui": "ok"}


def _python(arguments, **options):
    script, *others = arguments
    command = [sys.executable, str(HERE / script), *others]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout
