"""`--shard`: the processes of `torchrun` write one file."""

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

from fast_video_vae.tests.builders import installed_command, module_command, succeeded

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.vae.families import relative_error  # noqa: E402
from fast_video_vae.vae import CLIP_PATH  # noqa: E402
from fast_video_vae.vae.media import load_latent, read_video  # noqa: E402

PLAIN = "--dtype", "fp32", "--device", "cpu"


def torchrun(ranks, *arguments):
    """Run the command line in some processes; the result of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command += ["--nproc-per-node", str(ranks), *installed_command(*map(str, arguments))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextlib.contextmanager
def started(ranks, *arguments):
    """Start the command line in some processes, as torchrun does; nothing ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            own = shared | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            process = subprocess.Popen(
                installed_command(*map(str, arguments)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment | {"MASTER_ADDR": "127.0.0.1"},
            )
            stack.enter_context(process)  # closes its pipes, and waits for it
            stack.callback(process.kill)
            processes.append(process)
        yield processes


@pytest.fixture
def latents(tmp_path):
    path = tmp_path / "latents.safetensors"
    save_file({"latent": torch.randn(1, 16, 3, 8, 12)}, path)
    return path


def frames_of(path):
    return torch.cat(list(read_video(path).pieces(multiple=1)), dim=2)


@pytest.mark.parametrize("task", ["decode", pytest.param("encode", marks=pytest.mark.slow)])
def test_the_file_is_that_of_one_process(done, vae_path, latents, tmp_path, task):
    suffix, given = "mkv", [latents, "--shard", "rows", "-q"]
    if task == "encode":
        suffix = "safetensors"
        given = [CLIP_PATH, "--shard", "auto", "--frames-limit", "9", "--size", "96x64"]
    one, two = (tmp_path / f"{count}.{suffix}" for count in ("one", "two"))
    done(task, given[0], "-o", one, *given[3:])
    run = torchrun(2, task, *given, "-o", two, "--vae", vae_path, *PLAIN)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith(f"wrote {two}: ")
    assert run.stdout.count("wrote") == 1
    assert {*tmp_path.iterdir()} - {latents} == {one, two}
    if task == "encode":
        assert relative_error(*(load_latent(path).latent for path in (two, one))) <= 1e-5
    else:
        expected, actual = (frames_of(path).int() for path in (one, two))
        assert (actual - expected).abs().max() <= 1


def test_shards_need_torchrun(run, vae_path, latents, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out.mkv"
    code, _, errors = run("decode", latents, "-o", out, "--vae", vae_path, "--shard", "auto")
    assert (code, errors) == (
        1,
        [
            "fast-video-vae: error: RANK is not set; expected torchrun --nproc-per-node N -m "
            "fast_video_vae decode ... --shard auto"
        ],
    )
    assert not out.exists()


def test_more_ranks_than_rows_is_one_line(vae_path, latents, tmp_path):
    save_file({"latent": torch.randn(1, 16, 2, 2, 2)}, latents)
    options = "-o", tmp_path / "out.mkv", "--vae", vae_path, *PLAIN, "--shard", "columns"
    with started(3, "decode", latents, *options) as processes:
        ends = [process.communicate(timeout=60) for process in processes]
    line = (
        "fast-video-vae: error: the latents have 2 columns, too few for 3 ranks; expected at most "
        "2 ranks"
    )
    assert [errors.splitlines()[-1:] for _, errors in ends] == 3 * [[line]]
    assert [process.returncode for process in processes] == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [latents]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_others_end_when_a_rank_is_killed(vae_path, latents, tmp_path, victim):
    save_file({"latent": torch.randn(1, 16, 200, 32, 32)}, latents)
    options = "-o", tmp_path / "out.mkv", "--vae", vae_path, *PLAIN, "--shard", "rows"
    with started(3, "decode", latents, *options, "--chunk", "1") as processes:
        assert processes[0].stdout.readline().startswith("vae.safetensors: wan2.1")
        time.sleep(2)  # some steps
        processes[victim].send_signal(signal.SIGKILL)
        ends = [process.communicate(timeout=30) for process in processes]
    for rank, (process, (_, errors)) in enumerate(zip(processes, ends, strict=True)):
        line = [f"fast-video-vae: error: rank {victim} of 3 ended unexpectedly"]
        assert errors.splitlines()[-1:] == ([] if rank == victim else line)
        assert process.returncode == (-signal.SIGKILL if rank == victim else 1)
    assert list(tmp_path.iterdir()) == [latents]


def test_the_plan_of_a_rank_is_shown(run, vae_path):
    code, lines, _ = run("info", vae_path, "--ranks", "4", "--limit", "24")
    assert code == 0
    assert sum("a part of every frame on each of 4 ranks" in line for line in lines) == 10


def test_the_package_runs_as_a_module():
    """`torchrun -m fast_video_vae` starts it so."""
    assert succeeded(module_command("fast_video_vae", "--version")).stdout.startswith("fast-video-")
