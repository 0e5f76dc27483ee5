"""A signal ends a command at any moment and leaves the output folder as it was."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from fast_video_vae.tests.builders import installed_command

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")
if not Path("/proc/self/maps").exists():
    pytest.skip("/proc exists on Linux only", allow_module_level=True)

from fast_video_vae.vae.cli.signals import Signals  # noqa: E402
from fast_video_vae.vae.media.atomic_file import whole_file  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def start(command, ignored=()):
    def prepare():
        for number in SIGNALS:
            # Background jobs of a shell ignore SIGINT, and subprocesses inherit that.
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, preexec_fn=prepare, **streams)


def wait_for(process, happened):
    deadline = time.monotonic() + 60
    while not happened():
        # A process can reach the state and end between the two calls.
        assert process.poll() is None or happened(), process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")]
)
def test_a_signal_leaves_the_old_file(out, number, said):
    """SIGINT while torch is imported, SIGTERM midway; an ignored SIGHUP does nothing."""
    (out / "clip_decoded.mp4").write_bytes(b"old")
    # The bundled clip is seconds of work.
    command = installed_command("demo", "--out", str(out), "--overwrite", "--device", "cpu")
    with start(command, [signal.SIGHUP]) as process:
        if number == signal.SIGINT:
            maps = Path(f"/proc/{process.pid}/maps")
            wait_for(process, lambda: "libtorch" in maps.read_text())
        else:
            while " on cpu" not in process.stdout.readline():
                assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert stderr == f"fast-video-vae: {said}\n"
    assert content(out) == {"clip_decoded.mp4": b"old"}


def test_a_second_signal_ends_the_process_at_once(out):
    """Also where the error of the first one is lost."""
    part = out / "part"
    first = f"""
import pathlib, time
from fast_video_vae.vae.cli.signals import Signals
from fast_video_vae.vae.media import atomic_file
with Signals():
    atomic_file.unfinished.add(pathlib.Path({str(part)!r}))
    pathlib.Path({str(part)!r}).touch()
    for name in ("first", "second"):
        try:
            pathlib.Path({str(out.parent)!r}, name).touch()
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""
    with start(installed_command(first=first)) as process:
        for name in ("first", "second"):
            wait_for(process, (out.parent / name).exists)
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == "fast-video-vae: ended by SIGTERM\n"
    assert not list(out.iterdir())


def test_signals_after_the_work_are_ignored_and_the_previous_handlers_restored(out, run):
    before, codes = [*map(signal.getsignal, SIGNALS)], []
    with Signals() as signals:
        with whole_file(out / "a") as draft:
            draft.part.write_bytes(b"done")
        signal.raise_signal(signal.SIGTERM)
        assert signals.number == 0
    assert content(out) == {"a": b"done"}
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signals.number == signal.SIGTERM
    thread = threading.Thread(target=lambda: codes.append(run("info", "none")[0]))
    thread.start()
    thread.join()
    assert codes == [1]
    assert [*map(signal.getsignal, SIGNALS)] == before
