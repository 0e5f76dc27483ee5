"""The processes of `torchrun` write one file."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import installed_command, succeeded

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.vae.families import STATES  # noqa: E402
from fast_video_vae.tests.videos import stacked  # noqa: E402


def test_the_file_is_that_of_one_process(done, vae_path, tmp_path):
    latents, one, two = (tmp_path / name for name in ("a.safetensors", "one.mkv", "two.mkv"))
    save_file({"latent": torch.randn(1, 16, 3, 8, 12)}, latents)
    done("decode", latents, "-q", "-o", one)
    given = "--vae", vae_path, "--dtype", "fp32", "--device", "cpu", "--shares", "1,2"
    torchrun = "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"
    decode = installed_command("decode", *map(str, (latents, "-q", "-o", two, *given)))
    printed = succeeded([sys.executable, "-m", *torchrun, *decode], timeout=120).stdout
    assert printed.splitlines()[-1].startswith(f"wrote {two}: ")
    assert printed.count("wrote") == 1
    assert {*tmp_path.iterdir()} == {latents, one, two}
    assert torch.equal(stacked(one), stacked(two))


@pytest.mark.slow
def test_a_wrong_rank_ends_all_with_one_line(vae_path, tmp_path):
    latents, other, out = (tmp_path / name for name in ("latents", "other", "out.mkv"))
    save_file({"latent": torch.randn(1, 16, 3, 8, 12)}, latents)
    save_file({name: 2 * value for name, value in STATES["wan2.1"]().items()}, other)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank, vae in enumerate((vae_path, other)):
        env = os.environ | address | {"WORLD_SIZE": "2", "RANK": str(rank)}
        options = map(str, (latents, "-o", out, "--device", "cpu", "--vae", vae))
        command = installed_command("decode", *options)
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in processes]
    wrong = "rank 1 of 2 has another VAE; expected that of rank 0"
    assert lines[0].endswith(f"error: {wrong}")
    assert lines[1].endswith(f"error: rank 0 of 2 stopped: {wrong}")
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
