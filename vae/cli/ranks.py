"""The processes that `torchrun` has started: rank 0 runs the command, and the others work for it.

PyTorch is imported when a command runs.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..media.atomic_file import unfinished

if TYPE_CHECKING:
    from ..streaming.bands.ranks import Ranks


def leads() -> bool:
    """Return whether this process prints and writes the result."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"


@contextlib.contextmanager
def joined_ranks(args: argparse.Namespace) -> Iterator["Ranks | None"]:
    """Join the processes of `torchrun` for the block; None: there is only this one.

    A process without `--device` takes the GPU of its number.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    if args.command not in ("encode", "decode"):
        raise ValueError(
            f"torchrun is for encode and decode; expected one process to {args.command}"
        )
    if args.devices:
        raise ValueError("--devices is for one process; expected it without torchrun")
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from ..streaming.bands.ranks import Ranks  # noqa: PLC0415

    if torch.cuda.is_available() and args.device in (None, "cuda"):
        number = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        args.device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo")
    with Ranks(unfinished) as ranks:
        yield ranks
    dist.destroy_process_group()
