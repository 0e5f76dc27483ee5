"""Processes that run tasks together as the ranks of a group, over gloo on this machine."""

import importlib
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from fast_video_vae.tests.builders import script_command

_MAIN = "from fast_video_vae.tests.vae.sharding.pool import serve; serve()"


class Pool:
    """Processes that run one task at a time, each as one rank.

    Args:
        size: Number of processes.
        backend: Of the groups; with NCCL each process has a GPU of its own.
    """

    def __init__(self, size, backend="gloo"):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self.processes = [
            subprocess.Popen(
                script_command(_MAIN, rank, size, store, backend),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]

    def run(self, task, ranks=None, **options):
        """Run `task(group, **options)` in the first `ranks` processes; their results, or errors."""
        ranks = ranks or self.size
        for rank in range(ranks):
            self.start(rank, task, ranks, **options)
        answers = [self._answer(rank) for rank in range(ranks)]
        return [self._checked(rank, answer) for rank, answer in enumerate(answers)]

    def start(self, rank, task, ranks=None, **options):
        """Start a task in one process."""
        stdin = self.processes[rank].stdin
        pickle.dump((task.__module__, task.__qualname__, ranks or self.size, options), stdin)
        stdin.flush()

    def result(self, rank):
        """Wait for the result of a rank."""
        return self._checked(rank, self._answer(rank))

    def _answer(self, rank):
        return pickle.load(self.processes[rank].stdout)

    def _checked(self, rank, answer):
        fine, result = answer
        if not fine:
            raise AssertionError(f"rank {rank}:\n{result}")
        return result

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._folder.cleanup()


def serve():
    """Run the tasks of the parent process until it ends."""
    rank, size, store, backend = sys.argv[1:]
    torch.set_num_threads(1)
    results = sys.stdout.buffer
    sys.stdout = sys.stderr
    if "nccl" in backend:
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=int(rank), world_size=int(size)
    )
    groups = {count: dist.new_group(list(range(count))) for count in range(1, int(size) + 1)}
    while True:
        try:
            module, name, ranks, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            task = getattr(importlib.import_module(module), name)
            result = True, task(groups[ranks], **options)
        except Exception:
            result = False, traceback.format_exc()
        pickle.dump(result, results)
        results.flush()
