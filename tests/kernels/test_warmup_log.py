"""The log of preparations (builds, graph captures) with their times."""

import threading
import time

import pytest

from fast_video_vae.kernels import preparations, preparing
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops import build


def noted(before):
    """Return the preparations that were logged since `before`."""
    return preparations()[len(before) :]


def test_a_preparation_is_logged_with_time_and_thread():
    before, start = preparations(), time.perf_counter()
    with preparing("graph capture", "VAE"):
        time.sleep(0.01)
    (done,) = noted(before)
    assert (done.kind, done.label) == ("graph capture", "VAE")
    assert done.thread == threading.get_ident()
    assert start <= done.start <= done.end - 0.01
    assert done.end <= time.perf_counter()


def test_a_failed_preparation_is_logged_too():
    before = preparations()
    with pytest.raises(OSError, match="full"), preparing("kernel build"):
        raise OSError("full")
    assert len(noted(before)) == 1


class Slow(build.Library):
    """A library whose build takes 10 ms and can fail."""

    name = namespace = "fast_video_vae_never_registered"
    title = "slow kernels"
    minutes = "a moment"

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def key(self):
        return "0"

    def _build(self, place, key):
        time.sleep(0.01)
        if self.fails:
            raise build.Failure("the compiler failed", "update it")


@pytest.mark.parametrize("fails", [False, True])
def test_the_build_of_a_library_is_logged_once(fails, monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(build, "_loads", lambda place: False)
    library, before = Slow(fails), preparations()
    for _ in range(2):
        if fails:
            with pytest.raises(Refusal, match="the compiler failed"):
                library.load()
        else:
            library.load()
    (done,) = noted(before)
    assert (done.kind, done.label) == ("kernel build", "slow kernels")
    assert done.end - done.start >= 0.01


def test_loading_a_built_library_is_not_logged(monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(build, "_loads", lambda place: True)
    before = preparations()
    Slow(False).load()
    assert not noted(before)
