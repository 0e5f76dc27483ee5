"""`--shard`: the processes that `torchrun` has started share one video.

Rank 0 prints and writes the file; the others only compute. PyTorch is imported when a command runs.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..media.atomic_file import unfinished

if TYPE_CHECKING:
    from ..model import VideoVAE

# What `torchrun` sets for each process.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def leads(args: argparse.Namespace) -> bool:
    """Return whether this process, with arguments `args`, prints and writes the result."""
    return getattr(args, "shard", None) is None or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined_ranks(args: argparse.Namespace) -> Iterator[None]:
    """Join the processes of `torchrun`, and leave them at the end of the block.

    A process without `--device` takes the GPU of its number, if there is one for each, and the
    processes are linked by that of the GPUs. Otherwise they share a GPU, or the CPU.
    """
    if getattr(args, "shard", None) is None:
        yield
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{missing[0]} is not set; expected torchrun --nproc-per-node N -m fast_video_vae "
            f"{args.command} ... --shard {args.shard}"
        )
    if args.devices:
        raise ValueError("--devices is for one process; expected it without --shard")
    if args.tile:
        raise ValueError("--tile is for one process; expected it without --shard")
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    number, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    backend = "gloo"
    if torch.cuda.is_available() and args.device in (None, "cuda"):
        count = torch.cuda.device_count()
        args.device = f"cuda:{number % count}"
        torch.cuda.set_device(args.device)
        if count >= ranks and dist.is_nccl_available():
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    yield
    # Not after an error, when GPUs may wait for a rank that is gone.
    dist.destroy_process_group()


def _partial_files() -> list[Path]:
    """Return the partial files of rank 0."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    found = [[*unfinished]]
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    return found[0]


@contextlib.contextmanager
def shared(args: argparse.Namespace, vae: "VideoVAE") -> Iterator[None]:
    """Share the videos of `vae` between the ranks, if `args` ask for it, within the block."""
    if getattr(args, "shard", None) is None:
        yield
        return
    vae.shard(axis=None if args.shard == "auto" else args.shard)
    files: list[Path] = []
    try:
        files = _partial_files()
        yield
    except ConnectionError as error:
        # A process that is killed cannot remove them.
        if str(error).startswith("rank 0 of"):
            for file in files:
                file.unlink(missing_ok=True)
        raise
    finally:
        vae.unshard()
