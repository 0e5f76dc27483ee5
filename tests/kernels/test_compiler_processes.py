"""No compiler goes on when the compilation has ended."""

import subprocess
import sys
import threading
import time

import pytest

from fast_video_vae.kernels.native_ops import compiler


def test_a_signal_while_a_thread_starts_ends_every_compiler(monkeypatch, tmp_path):
    """`ThreadPoolExecutor` does not list a thread if `Thread.start` raises."""
    starts, begun, threads = threading.Thread.start, [], []

    def interrupted(thread):
        threads.append(thread)
        starts(thread)
        if len(threads) == 2:
            raise KeyboardInterrupt

    class Slow(subprocess.Popen):
        def __init__(self, *args, **options):
            if threading.current_thread() is not threads[0]:
                time.sleep(0.3)
            super().__init__(*args, **options)
            begun.append(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(subprocess, "Popen", Slow)
    with pytest.raises(KeyboardInterrupt):
        compiler._run([[sys.executable, "-c", "import time; time.sleep(60)"]] * 2, tmp_path)
    for thread in threads:
        thread.join()
    running = [process for process in begun if process.poll() is None]
    for process in running:
        process.kill()
    assert begun
    assert not running
