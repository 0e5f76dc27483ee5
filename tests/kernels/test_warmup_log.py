"""The log of preparations (builds, graph captures) with their times."""

import threading
import time

import pytest

from fast_video_vae.kernels import preparations, preparing
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.native_ops import build


def test_a_preparation_is_logged_with_time_and_thread():
    before, start = len(preparations()), time.perf_counter()
    with preparing("graph capture", "VAE"):
        time.sleep(0.01)
    with pytest.raises(OSError, match="full"), preparing("kernel build"):
        raise OSError("full")
    done, failed = preparations()[before:]
    assert (done.kind, done.label, failed.kind) == ("graph capture", "VAE", "kernel build")
    assert done.thread == threading.get_ident()
    assert start <= done.start <= done.end - 0.01
    assert done.end <= time.perf_counter()


@pytest.mark.parametrize("built", [True, False])
def test_the_build_of_a_library_is_logged_once_and_loading_it_is_not(built, monkeypatch):
    def fails(_):
        raise build.Failure("the compiler failed")

    monkeypatch.setattr(build.Library, "_finds", lambda _: built)
    monkeypatch.setattr(build.Library, "_build", fails)
    library, before = build.Library(), len(preparations())
    for _ in range(2):
        if built:
            library.load()
        else:
            with pytest.raises(Refusal, match="the compiler failed"):
                library.load()
    done = [(each.kind, each.label) for each in preparations()[before:]]
    assert done == [] if built else [("kernel build", "CPU kernels")]
