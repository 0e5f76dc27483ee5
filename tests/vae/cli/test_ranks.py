"""The processes of `torchrun` write one file."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import installed_command, succeeded

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.vae.families import STATES  # noqa: E402
from fast_video_vae.tests.videos import stacked  # noqa: E402
from fast_video_vae.vae import CLIP_PATH  # noqa: E402
from fast_video_vae.vae.media import load_latent  # noqa: E402

PLAIN = "--dtype", "fp32", "--device", "cpu"


@contextlib.contextmanager
def started(*commands):
    """Start command lines as torchrun does, one as each rank; nothing ends the others.

    Yields the processes and a function that returns the last line of the error of each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": len(commands), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, arguments in enumerate(commands):
            own = shared | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            env = os.environ | {name: str(value) for name, value in own.items()}
            command = installed_command(*map(str, arguments))
            # Its end closes its pipes, and waits for it.
            processes.append(stack.enter_context(subprocess.Popen(command, env=env, **pipes)))
            stack.callback(processes[-1].kill)

        def lines():
            ends = [process.communicate(timeout=60)[1] for process in processes]
            return [(f"\n{end}".splitlines())[-1].partition(": error: ")[2] for end in ends]

        yield processes, lines


@pytest.fixture
def latents(tmp_path):
    path = tmp_path / "latents.safetensors"
    save_file({"latent": torch.randn(1, 16, 3, 8, 12)}, path)
    return path


@pytest.mark.parametrize("task", ["decode", pytest.param("encode", marks=pytest.mark.slow)])
def test_the_file_is_that_of_one_process(done, vae_path, latents, tmp_path, task):
    suffix, given, content = "mkv", [latents, "-q"], stacked
    if task == "encode":
        suffix, given = "safetensors", [CLIP_PATH, "--frames-limit", "9", "--size", "96x64"]
        content = lambda path: load_latent(path).latent  # noqa: E731
    one, two = (tmp_path / f"{count}.{suffix}" for count in ("one", "two"))
    done(task, *given, "-o", one)
    given = map(str, (*given, "-o", two, "--vae", vae_path, *PLAIN, "--shares", "1,2"))
    torchrun = "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"
    command = [sys.executable, "-m", *torchrun, *installed_command(task, *given)]
    printed = succeeded(command, timeout=120).stdout
    assert printed.splitlines()[-1].startswith(f"wrote {two}: ")
    assert printed.count("wrote") == 1
    assert {*tmp_path.iterdir()} - {latents} == {one, two}
    assert torch.equal(*map(content, (one, two)))


@pytest.mark.slow
def test_the_other_ends_when_a_rank_is_killed(vae_path, latents, tmp_path):
    save_file({"latent": torch.randn(1, 16, 200, 32, 32)}, latents)
    options = "-o", tmp_path / "out.mkv", "--vae", vae_path, *PLAIN, "--chunk", "1"
    with started(*[("decode", latents, *options)] * 2) as (processes, lines_of):
        assert processes[0].stdout.readline().startswith("vae.safetensors: wan2.1")
        time.sleep(1)  # some steps
        processes[1].send_signal(signal.SIGKILL)
        assert lines_of() == ["rank 1 of 2 ended unexpectedly", ""]
    assert processes[0].returncode == 1
    assert {*tmp_path.iterdir()} == {latents}


@pytest.mark.slow
@pytest.mark.parametrize("second", ["other", "missing"])
def test_a_wrong_rank_ends_all_with_one_line(vae_path, latents, tmp_path, second):
    other = tmp_path / "other"
    save_file({name: 2 * value for name, value in STATES["wan2.1"]().items()}, other)
    decode = "decode", latents, "-o", tmp_path / "out.mkv", *PLAIN, "--vae"
    wrong = "rank 1 of 2 has another VAE; expected that of rank 0"
    expected = [wrong, f"rank 0 of 2 stopped: {wrong}"]
    if second == "missing":
        missing = f"{tmp_path / 'missing'} does not exist; expected a .safetensors or .pth file"
        expected = [f"rank 1 of 2 stopped: {missing}", missing]
    with started((*decode, vae_path), (*decode, tmp_path / second)) as (_, lines_of):
        assert lines_of() == expected
    assert {*tmp_path.iterdir()} == {latents, other}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("info", "--device", "cpu"), "torchrun is for encode and decode; expected one process"),
        (("decode", "l", "-o", "o.mkv", "--vae", "v", "--devices", "cpu"), "--devices is for one"),
    ],
)
def test_other_uses_of_torchrun_are_one_line(run, monkeypatch, command, line):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, errors = run(*command)
    assert (code, len(errors)) == (1, 1)
    assert line in errors[0]
