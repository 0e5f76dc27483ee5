"""The log of preparations (builds, graph captures) with their times."""

import threading
import time

import pytest

from fast_video_vae.kernels import preparations, preparing


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
