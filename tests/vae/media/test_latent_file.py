"""Files that appear whole or not at all, and the file that holds a latent."""

import os
import stat
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.vae.media.latent_file import load_latent, save_latent, whole_file


def put(path, text="new"):
    with whole_file(path) as part:
        part.write_text(text)


def test_a_whole_file_takes_its_name(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as part:
        part.write_text("new")
        assert not path.exists()
        assert part.parent == path.parent  # so that the last step is a rename
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def work():
        with whole_file(path) as part:
            part.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        work()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_of_the_final_name(tmp_path, limited_files):
    path = tmp_path / "a.bin"
    with limited_files(1000), pytest.raises(OSError, match=r"File too large: .*/a\.bin'"):
        put(path, "x" * 2000)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="links and masks of POSIX")
def test_links_and_masks_are_kept(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        put(link)
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none/a.txt", FileNotFoundError, "none/a.txt"),
        ("file/a.txt", NotADirectoryError, "file/a.txt"),
        (".", ValueError, "is a folder; expected the name of a file"),
        ("/dev/null", ValueError, "is a device; expected the name of a file"),
    ],
)
def test_a_place_that_cannot_be_written_is_known_before_any_work(tmp_path, name, error, message):
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message), whole_file(tmp_path / name):
        pytest.fail("work began")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_latent_comes_back_with_what_was_said_of_it(tmp_path):
    path = tmp_path / "a.safetensors"
    latent = torch.randn(1, 16, 3, 2, 4, dtype=torch.bfloat16)
    save_latent(path, latent, family="wan2.1", fps=Fraction(30000, 1001), frames=9)
    file = load_latent(path)
    assert file.latent.dtype == torch.float32
    assert torch.equal(file.latent, latent.float())
    assert (file.family, file.fps) == ("wan2.1", Fraction(30000, 1001))


@pytest.mark.parametrize("key", ["samples", "latent_tensor"])
def test_latents_of_comfyui_are_read(tmp_path, key):
    latent = torch.randn(1, 16, 3, 2, 4)
    tensors = {key: latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, tmp_path / "a.latent", {"prompt": "{}"})
    file = load_latent(tmp_path / "a.latent")
    assert torch.equal(file.latent, latent)
    assert (file.family, file.fps) == (None, None)


def cut(path: Path) -> None:
    save_latent(path, torch.zeros(1, 16, 1, 2, 2), family="wan2.1", fps=Fraction(24), frames=1)
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, FileNotFoundError, "No such file"),
        (lambda path: path.touch(), ValueError, "is not a whole safetensors file"),
        (cut, ValueError, "is not a whole safetensors file"),
        (
            lambda path: save_file({"x": torch.zeros(1)}, path),
            ValueError,
            r"has the tensors \['x'\]; expected one named latent",
        ),
        (
            lambda path: save_file({"latent": torch.zeros(1, 16, 2, 2)}, path),
            ValueError,
            r"is \[1, 16, 2, 2\]; expected \[1, C, t, h, w\]",
        ),
        (
            lambda path: save_file({"latent": torch.zeros(2, 16, 1, 2, 2)}, path),
            ValueError,
            r"is \[2, 16, 1, 2, 2\]",  # two videos
        ),
        (
            lambda path: save_file({"latent": torch.zeros(1, 16, 1, 2, 2)}, path, {"fps": "x"}),
            ValueError,
            "gives its fps as 'x'; expected a number",
        ),
        (
            # of which Fraction would make a number of a billion digits
            lambda path: save_file(
                {"latent": torch.zeros(1, 16, 1, 2, 2)}, path, {"fps": "1e999999999"}
            ),
            ValueError,
            "gives its fps as '1e999999999'; expected a number",
        ),
        (
            lambda path: save_file({"latent": torch.zeros(1, 16, 0, 2, 2)}, path),
            ValueError,
            r"is \[1, 16, 0, 2, 2\]; expected \[1, C, t, h, w\]",
        ),
        (
            lambda path: save_file({"a\nb": torch.zeros(1)}, path),
            ValueError,
            "expected one named latent",
        ),
        (
            lambda path: path.write_bytes(b"<!DOCTYPE html>"),
            ValueError,
            "is not a whole safetensors file: it is an HTML page",
        ),
    ],
)
def test_a_bad_latent_file_is_one_line_that_names_it(tmp_path, make, error, message):
    path = tmp_path / "a.safetensors"
    make(path)
    with pytest.raises(error, match=message) as caught:
        load_latent(path)
    assert "a.safetensors" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300
