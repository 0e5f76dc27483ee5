"""Processes whose device another process uses, over gloo on this machine."""

import contextlib
import importlib
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.vae.families import STATES
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.streaming.bands.ranks import RankError, Ranks
from fast_video_vae.vae.streaming.bands.team import Team

_MAIN = "from fast_video_vae.tests.vae.streaming.processes import serve; serve()"


class Processes:
    """This process as rank 0, and others."""

    def __init__(self, size):
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self.others = [
            subprocess.Popen(script_command(_MAIN, rank, size, store), stdin=subprocess.PIPE)
            for rank in range(1, size)
        ]
        _join(0, size, store)
        self._cores = torch.get_num_threads()
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def shared(self, vae, count, shares, make, *arguments):
        """The first `count` processes share the videos of `vae`, as `make(*arguments)` has it."""
        for process in self.others:
            pickle.dump((make.__module__, make.__qualname__, arguments), process.stdin)
            process.stdin.flush()
        with Ranks() as ranks:
            vae.team = Team(vae.replicas, ranks.lead(vae)[:count], shares)
            try:
                yield
            finally:
                vae.devices = []

    def close(self):
        torch.set_num_threads(self._cores)
        for process in self.others:
            process.kill()
            process.wait()
            process.stdin.close()
        dist.destroy_process_group()
        self._folder.cleanup()


def failing(rank, calls, error):
    """A VAE whose layers raise `error` in one rank, after some calls."""
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    left = iter(range(calls))

    def fail(*_):
        if dist.get_rank() == rank and next(left, None) is None:
            raise error

    for network in (vae.encoder, vae.decoder):
        network.layers()[4].register_forward_pre_hook(fail)
    return vae


def serve():
    """Work for rank 0 until it ends."""
    _join(*map(int, sys.argv[1:3]), sys.argv[3])
    torch.set_num_threads(1)
    while True:
        try:
            module, name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        vae = getattr(importlib.import_module(module), name)(*arguments)
        with contextlib.suppress(RankError), Ranks() as ranks:
            ranks.follow(vae)


def _join(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
