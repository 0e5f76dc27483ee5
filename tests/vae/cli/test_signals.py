"""A signal ends a command at any moment and leaves the output folder as it was."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import installed_command, random_state_dict

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")
if not Path("/proc/self/maps").exists():
    pytest.skip("/proc exists on Linux only", allow_module_level=True)

from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae.cli.signals import Signals  # noqa: E402
from fast_video_vae.vae.layers.causal_conv import CausalConv3d  # noqa: E402
from fast_video_vae.vae.media import VideoWriter, read_video  # noqa: E402
from fast_video_vae.vae.media.atomic_file import whole_file  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A VAE, a video of seconds of work, and latents of fewer frames than x264 buffers."""
    folder = tmp_path_factory.mktemp("inputs")
    save_file(random_state_dict(8), folder / "vae.safetensors")
    save_file({"latent": torch.randn(1, 16, 9, 4, 6)}, folder / "short.safetensors")
    write_clip(folder / "long.mp4", 2001)
    return folder


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def arguments(command, files, out):
    given = {
        "demo": (files / "long.mp4", "--out", out),
        "encode": (files / "long.mp4", "-o", out / "l.safetensors"),
        "decode": (files / "short.safetensors", "-o", out / "d.mp4"),
    }
    vae = files / "vae.safetensors"
    return [*map(str, (command, *given[command], "--overwrite", "--vae", vae))]


def start(given, ignored=()):
    def prepare():
        for number in SIGNALS:
            # Background jobs of a shell ignore SIGINT, and subprocesses inherit that.
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(installed_command(*given), env=env, preexec_fn=prepare, **streams)


def seconds_of(process):
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(process, happened):
    deadline = time.monotonic() + 60
    while not happened():
        # A process can reach the state and end between the two calls.
        assert process.poll() is None or happened(), process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def written(out):
    """Return whether an unfinished output file has content."""
    try:
        return any(part.stat().st_size for part in out.glob(".*.part"))
    except FileNotFoundError:
        return True  # renamed to its final name meanwhile


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "old", "number", "said"),
    [
        ("encode", "l.safetensors", signal.SIGINT, "interrupted"),  # while torch is imported
        ("demo", "long_decoded.mp4", signal.SIGHUP, None),  # midway; the terminal closes
        ("decode", "d.mp4", signal.SIGTERM, "ended by SIGTERM"),  # while it is completed
    ],
)
def test_a_signal_leaves_the_old_file(out, files, command, old, number, said):
    (out / old).write_bytes(b"old")
    with start(arguments(command, files, out)) as process:
        if command == "encode":
            maps = Path(f"/proc/{process.pid}/maps")
            wait_for(process, lambda: "libtorch" in maps.read_text())
        elif command == "demo":
            while " on cpu" not in process.stdout.readline():
                assert process.poll() is None, process.stderr.read()
            before = seconds_of(process)
            wait_for(process, lambda: seconds_of(process) > before + 0.4)
            process.stderr.close()
        else:  # a busy machine may see only the end
            wait_for(process, lambda: process.poll() is not None or written(out))
        process.send_signal(number)
        stderr = process.stderr.read() if said else None
        process.wait(timeout=30)
    if command == "decode" and process.returncode in (0, -number):
        # The signal came when the work was done: during the last rename, or at the exit of Python,
        # which restores the previous handlers.
        assert [path.name for path in out.iterdir()] == [old]
        assert read_video(out / old).estimated_frames == 33
        return
    assert process.returncode == 128 + number
    assert stderr == (said and f"fast-video-vae: {said}\n")
    assert content(out) == {old: b"old"}


@pytest.mark.parametrize("end", ["ended by SIGTERM", "error: No space left on device"])
def test_the_end_of_a_video_that_restarts_leaves_the_old_file(out, files, run, monkeypatch, end):
    """Memory runs out, and a signal or a full disk ends the run that goes on."""
    (out / "d.mp4").write_bytes(b"old")
    calls, convolve, is_signal = [], CausalConv3d.forward, end.endswith("SIGTERM")

    def forward(*arguments, **options):
        calls.append(1)
        if len(calls) == 45:
            raise torch.OutOfMemoryError("no memory")
        if len(calls) == 70 and is_signal:
            signal.raise_signal(signal.SIGTERM)
        return convolve(*arguments, **options)

    def write(*_):
        if len(calls) > 45 and not is_signal:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(CausalConv3d, "forward", forward)
    monkeypatch.setattr(VideoWriter, "write", write)
    code, _, errors = run(*arguments("decode", files, out), "--quiet")
    assert (code, len(errors), len(calls) >= 70) == (143 if is_signal else 1, 1, True)
    assert errors[0].startswith(f"fast-video-vae: {end}")
    assert content(out) == {"d.mp4": b"old"}


@pytest.mark.slow
def test_an_ignored_hangup_stays_ignored(out, files):
    """`nohup` starts a command with SIGHUP ignored."""
    with start(arguments("decode", files, out), [signal.SIGHUP]) as process:
        wait_for(process, lambda: any(out.glob(".*.part")))
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert [path.name for path in out.iterdir()] == ["d.mp4"]


def test_a_process_that_cannot_run_its_handler_is_ended(out):
    """Python runs no handler during a long call into C."""
    part = out / "part"
    first = f"""
import hashlib, pathlib
from fast_video_vae.vae.cli import signals
from fast_video_vae.vae.media import atomic_file
signals.GRACE_S = 0.3
with signals.Signals():
    atomic_file.unfinished.add(pathlib.Path({str(part)!r}))
    pathlib.Path({str(part)!r}).touch()
    hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)
"""
    command = installed_command(first=first)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, part.exists)
        wait_for(process, lambda: seconds_of(process) > 0.3)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == "fast-video-vae: ended by SIGTERM\n"
    assert not list(out.iterdir())


def test_later_signals_and_those_after_the_work_are_ignored(out):
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert signals.number == signal.SIGTERM
    with Signals():
        with whole_file(out / "a") as draft:
            draft.part.write_bytes(b"done")
        signal.raise_signal(signal.SIGTERM)
    assert content(out) == {"a": b"done"}


def test_the_previous_handlers_are_restored_and_a_thread_can_run_a_command(run):
    before, codes = [*map(signal.getsignal, SIGNALS)], []
    thread = threading.Thread(target=lambda: codes.append(run("info", "none")[0]))
    thread.start()
    thread.join()
    assert [*codes, run("info", "none")[0]] == [1, 1]
    assert [*map(signal.getsignal, SIGNALS)] == before
