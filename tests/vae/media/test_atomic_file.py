"""A file or folder appears under its name only when it is complete, and replaces none."""

import errno
import itertools
import os
import stat
from contextlib import nullcontext, suppress

import pytest

from fast_video_vae.vae.media.atomic_file import remove_unfinished, whole_file, whole_folder


@pytest.fixture(params=["links", "no links"])
def disk(request, monkeypatch):
    """Some disks, such as exFAT, have no hard links."""

    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", link)


def make(whole, path, text, **options):
    """Write `text` to a new file or folder `path` while another one takes that name."""
    with whole(path, **options) as draft:
        with whole(path, **options) as first:
            write(first.part, "first")
        assert first.path == path
        write(draft.part, text)
    return draft.path


def write(part, text):
    (part / "0" if part.is_dir() else part).write_text(text)


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize(
    ("whole", "older", "next_name"),
    [(whole_file, "a_2.b", "a_3.b"), (whole_folder, "a.b_2", "a.b_3")],
)
def test_a_name_that_is_taken_meanwhile_is_kept(tmp_path, whole, older, next_name):
    path = tmp_path / "a.b"
    (tmp_path / older).write_text("older")
    found = make(whole, path, "second")
    assert found.name == next_name
    names = (tmp_path / f"x{number}.b" for number in itertools.count())
    (tmp_path / "x0.b").write_text("older")
    assert make(whole, tmp_path / "y.b", "second", others=names).name == "x1.b"
    texts = {p.name: (p / "0" if p.is_dir() else p).read_text() for p in tmp_path.iterdir()}
    assert texts == {
        "a.b": "first", older: "older", next_name: "second",
        "y.b": "first", "x0.b": "older", "x1.b": "second",
    }  # fmt: skip


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_file_is_replaced_when_it_is_complete_or_kept(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        whole_file(path, overwrite=True) as draft,
    ):
        assert draft.part.parent == path.parent  # so the last step is a rename
        draft.part.write_text("new")
        assert path.read_text() == "old"
        if error is not None:
            raise error
    assert path.read_text() == ("old" if error else "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="links and masks of POSIX")
def test_links_and_permissions_are_kept(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        with whole_file(link, overwrite=True) as draft:
            draft.part.write_text("new")
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("file", ValueError, "file exists already; expected"),
        ("none/a.txt", FileNotFoundError, "none/a.txt"),
        (".", ValueError, "is a folder; expected the name of a file"),
        ("/dev/null", ValueError, "is a device; expected the name of a file"),
    ],
)
def test_an_unwritable_path_is_refused_before_any_work(tmp_path, name, error, message):
    (tmp_path / "file").write_text("older")
    for whole in (whole_file, whole_folder)[: 2 if name == "file" else 1]:
        with pytest.raises(error, match=message), whole(tmp_path / name):
            pytest.fail("work began")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "older")]


def test_a_signal_removes_what_is_unfinished(tmp_path):
    with suppress(FileNotFoundError), whole_folder(tmp_path / "a") as draft:
        (draft.part / "0").touch()
        remove_unfinished()
        assert not list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
