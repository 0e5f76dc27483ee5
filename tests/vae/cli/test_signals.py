"""A signal ends a command at any moment and leaves the output folder as it was."""

import itertools
import os
import signal
import subprocess
import textwrap
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

import fcntl  # noqa: E402
import pty  # noqa: E402
import termios  # noqa: E402

from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae.cli.main import main  # noqa: E402
from fast_video_vae.vae.cli.signals import Signals, Stopped  # noqa: E402
from fast_video_vae.vae.layers.causal_conv import CausalConv3d  # noqa: E402
from fast_video_vae.vae.media import VideoWriter, load_latent, read_video  # noqa: E402
from fast_video_vae.vae.media.atomic_file import whole_file  # noqa: E402

COMMANDS = ("demo", "encode", "decode")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAID = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}
MOMENTS = ("import", "opened", "loaded", "midway", "closing")
# Each command and signal once, at the moments that differ most; the others are nightly.
SAMPLE = {
    ("encode", signal.SIGHUP, "import"),
    ("demo", signal.SIGINT, "midway"),
    ("decode", signal.SIGTERM, "closing"),
}
LONG, SHORT = 2001, 33  # frames: seconds of work, and fewer than x264 buffers before it writes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A VAE, a long and a short video, and a latent file for each."""
    folder = tmp_path_factory.mktemp("inputs")
    save_file(random_state_dict(8), folder / "vae.safetensors")
    for frames in (LONG, SHORT):
        write_clip(folder / f"{frames}.mp4", frames)
        latent = torch.randn(1, 16, (frames - 1) // 4 + 1, 4, 6)
        save_file({"latent": latent}, folder / f"{frames}.safetensors")
    return folder


def arguments(command, files, out, frames):
    given = {
        "demo": (files / f"{frames}.mp4", "--out", out),
        "encode": (files / f"{frames}.mp4", "-o", out / "l.safetensors"),
        "decode": (files / f"{frames}.safetensors", "-o", out / "d.mp4"),
    }
    return command, *given[command], "--overwrite", "--vae", files / "vae.safetensors"


def start(given, *, ignored=(), terminal=subprocess.PIPE, **settings):
    def prepare():
        if terminal != subprocess.PIPE:
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number in SIGNALS:
            # Background jobs of a shell ignore SIGINT, and subprocesses inherit that.
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen(
        installed_command(*map(str, given)),
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        text=True,
        preexec_fn=prepare,
    )


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


def wait_until(process, moment, out):
    """Wait until a command reaches one of `MOMENTS`; each is detected, not a fixed delay."""
    if moment == "import":
        wait_for(process, lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
        return
    if moment == "closing":  # short: a busy machine may see only the end
        wait_for(process, lambda: process.poll() is not None or written(out))
        return
    wait_for(process, lambda: any(out.glob(".*.part")))
    if moment in ("loaded", "midway"):
        while " on cpu" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        before = seconds_of(process)
        if moment == "midway":
            wait_for(process, lambda: seconds_of(process) > before + 0.4)


def written(out):
    """Return whether an unfinished output file has content."""
    try:
        return any(part.stat().st_size for part in out.glob(".*.part"))
    except FileNotFoundError:
        return True  # renamed to its final name meanwhile


@pytest.fixture
def as_in_a_terminal():
    """Set the default handlers, because background jobs of a shell ignore SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_whole(out):
    """Check that new results in `out` are complete and that no partial file is left."""
    for path in out.iterdir():
        if path.suffix == ".mp4" and path.read_bytes() != b"old":
            assert len(list(read_video(path).frames())) == SHORT
        elif path.suffix == ".safetensors":
            assert load_latent(path).latent.shape[2] == (SHORT - 1) // 4 + 1
        assert path.suffix != ".part"


@pytest.mark.parametrize(
    ("command", "number", "moment"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly)
        for case in itertools.product(COMMANDS, SIGNALS, MOMENTS)
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_leaves_the_old_file(tmp_path, files, command, number, moment):
    out = tmp_path / "out"
    out.mkdir()
    frames = SHORT if moment == "closing" else LONG
    target = {"encode": "l.safetensors", "decode": "d.mp4", "demo": f"{frames}_decoded.mp4"}
    (out / target[command]).write_bytes(b"old")
    before = content(out)
    with start(arguments(command, files, out, frames)) as process:
        wait_until(process, moment, out)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    if moment == "closing" and process.returncode in (0, -number):
        # The signal came when the work was done: during the last rename, or at the exit of Python,
        # which restores the previous handlers.
        check_whole(out)
        return
    assert process.returncode == 128 + number
    assert stderr == f"fast-video-vae: {SAID[number]}\n"
    assert content(out) == before


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize(
    ("command", "end"), [("decode", "SIGTERM"), ("encode", "SIGINT"), ("decode", "a full disk")]
)
def test_the_end_of_a_video_that_restarts_leaves_the_old_file(
    tmp_path, files, capsys, monkeypatch, command, end
):
    out, calls, convolve = tmp_path / "out", [], CausalConv3d.forward
    out.mkdir()
    (out / {"encode": "l.safetensors", "decode": "d.mp4"}[command]).write_bytes(b"old")

    def forward(conv, *arguments, **options):
        calls.append(conv)
        if len(calls) == 45:
            raise torch.OutOfMemoryError("no memory")
        if len(calls) == 70 and end.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, end))
        return convolve(conv, *arguments, **options)

    def full(*_):
        if len(calls) > 45:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(CausalConv3d, "forward", forward)
    if end == "a full disk":
        monkeypatch.setattr(VideoWriter, "write", full)
    code = main([*map(str, arguments(command, files, out, SHORT)), "--quiet"])
    assert len(calls) >= 70
    assert code == (128 + getattr(signal, end) if end.startswith("SIG") else 1)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "memory" not in line
    assert [path.read_bytes() for path in out.iterdir()] == [b"old"]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_compiler_ends_with_the_command(tmp_path, files, number):
    out, pids, cache = tmp_path / "out", tmp_path / "pids", tmp_path / "cache"
    out.mkdir()
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dump*) echo 12.2.0; exit;; *" -c "*) ;; *) echo gcc; exit;; esac\n'
        f"echo $$ >> {pids}; sleep 60\n"  # a shell and its child, like c++ and cc1plus
    )
    compiler.chmod(0o755)
    given = arguments("decode", files, out, SHORT)
    with start(given, CXX=str(compiler), FAST_VIDEO_VAE_CACHE=str(cache)) as process:
        wait_for(process, pids.exists)
        works = list(cache.glob("native/building-*"))
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert works
    assert not list(out.iterdir())
    assert not list(cache.glob("native/building-*"))
    deadline = time.monotonic() + 5
    while left := [place for place in Path("/proc").glob("[0-9]*/cwd") if works_in(place, works)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def works_in(place, folders):
    try:
        return str(place.readlink()).startswith(tuple(map(str, folders)))
    except OSError:
        return False


@pytest.mark.slow
def test_an_ignored_hangup_stays_ignored(tmp_path, files):
    """`nohup` starts a command with SIGHUP ignored."""
    with start(arguments("decode", files, tmp_path, SHORT), ignored=[signal.SIGHUP]) as process:
        wait_until(process, "opened", tmp_path)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == 0
    check_whole(tmp_path)


@pytest.mark.slow
def test_a_closed_terminal_ends_the_command(tmp_path, files):
    ours, theirs = pty.openpty()
    with start(arguments("demo", files, tmp_path, LONG), terminal=theirs) as process:
        os.close(theirs)
        wait_for(process, lambda: written(tmp_path))
        os.close(ours)
        assert process.wait(timeout=30) == 128 + signal.SIGHUP
    assert not list(tmp_path.iterdir())


# Python runs no handler during a long call into C, and ignores errors raised in a destructor.
DEAF = {
    "a call of C": "hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)",
    "a destructor": """
class Loud:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
loud = Loud()
del loud
time.sleep(60)
""",
}


@pytest.mark.parametrize("name", DEAF)
def test_a_process_that_cannot_run_its_handler_is_ended(tmp_path, name):
    first = f"""
import hashlib, os, pathlib, signal, time
from fast_video_vae.vae.cli import signals
from fast_video_vae.vae.media import atomic_file
signals.GRACE_S = 0.3
part = pathlib.Path({str(tmp_path / "part")!r})
with signals.Signals():
    atomic_file.unfinished.add(part)
    part.touch()
{textwrap.indent(DEAF[name], "    ")}
"""
    command = installed_command(first=first)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        if name == "a call of C":
            wait_for(process, (tmp_path / "part").exists)
            wait_for(process, lambda: seconds_of(process) > 0.3)
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr.endswith("fast-video-vae: ended by SIGTERM\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_only_the_first_signal_is_raised(as_in_a_terminal, number):
    with Signals():
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(number)
        for other in SIGNALS:
            signal.raise_signal(other)
    assert stopped.value.number == number


def test_a_signal_after_the_work_is_ignored(as_in_a_terminal, tmp_path):
    with Signals():
        with whole_file(tmp_path / "a") as draft:
            draft.part.write_bytes(b"done")
        signal.raise_signal(signal.SIGTERM)
    assert content(tmp_path) == {"a": b"done"}


def test_the_previous_handlers_are_restored(run):
    before = [signal.getsignal(number) for number in SIGNALS]
    assert run("info", "none")[0] == 1
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_thread_can_run_a_command(run):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run("info", "none")[0]))
    thread.start()
    thread.join()
    assert codes == [1]
