"""A file or folder appears under its name only when it is complete."""

import itertools
import os
import stat
import threading
from contextlib import suppress

import pytest

from fast_video_vae.vae.media.atomic_file import remove_unfinished, whole_file, whole_folder


def test_a_complete_file_gets_its_name(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as part:
        part.write_text("new")
        assert not path.exists()
        assert part.parent == path.parent  # the same folder, so the last step is a rename
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(tmp_path, error):
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


@pytest.mark.skipif(os.name != "posix", reason="links and masks of POSIX")
def test_links_and_permissions_are_kept(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        with whole_file(link) as part:
            part.write_text("new")
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
def test_an_unwritable_path_is_refused_before_any_work(tmp_path, name, error, message):
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message), whole_file(tmp_path / name):
        pytest.fail("work began")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_a_thread_fills_is_removed(tmp_path):
    started = threading.Event()

    def fill():
        with suppress(OSError), whole_folder(tmp_path / "a") as part:
            for number in itertools.count():
                (part / str(number)).touch()
                started.set()

    for _ in range(5):
        started.clear()
        thread = threading.Thread(target=fill)
        thread.start()
        assert started.wait(30)
        remove_unfinished()
        thread.join(30)
        assert not thread.is_alive()
        assert not list(tmp_path.iterdir())
