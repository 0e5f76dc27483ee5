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
    with pytest.raises(OSError, match="full"), preparing("kernel build"):
        raise OSError("full")
    done, failed = noted(before)
    assert (done.kind, done.label, failed.kind) == ("graph capture", "VAE", "kernel build")
    assert done.thread == threading.get_ident()
    assert start <= done.start <= done.end - 0.01
    assert done.end <= time.perf_counter()


class Slow(build.Library):
    """A library whose build takes 10 ms and can fail."""

    namespace = "fast_video_vae_never_registered"

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
    """Loading a built one is not."""
    monkeypatch.setattr(build.sys, "platform", "linux")
    for built in (True, False):
        monkeypatch.setattr(build, "_loads", lambda place, built=built: built)
        library, before = Slow(fails), preparations()
        for _ in range(2):
            if fails and not built:
                with pytest.raises(Refusal, match="the compiler failed"):
                    library.load()
            else:
                library.load()
        if built:
            assert not noted(before)
    (done,) = noted(before)
    assert (done.kind, done.label) == ("kernel build", "CPU kernels")
    assert done.end - done.start >= 0.01
