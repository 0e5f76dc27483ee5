"""The processes that share the videos of a VAE, as its methods."""

import contextlib
import importlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .shard import ShardGroup


class SharedRanks:
    """The part of a VAE that says which processes share its videos."""

    device: torch.device
    shards: "ShardGroup | None" = None  # from `shard`; None: this process has all of the video

    def shard(self, group: "ProcessGroup | None" = None, axis: str | None = None) -> None:
        """Share each video with other processes, each of which computes a part of every frame.

        All ranks make the same calls with the same inputs, and get the same results: those of one
        process except for rounding. If a rank ends, the others raise a `ShardError` that names it,
        and the group is of no more use. `devices`, `graphs` and tiles are not used. One thread at a
        time may use the VAE.

        Args:
            group: The processes; None: all of `torch.distributed`.
            axis: What is divided, "rows" or "columns"; None: the longer side of each video.

        Raises:
            ValueError: There is no process group, this process is not in it, or the axis is
                unknown, here or on another rank. A stream raises it too, for more ranks than rows
                or columns of a latent.
            ShardError: A rank does not make this call within 300 s.
        """
        self.unshard()
        # Some builds of PyTorch have no `torch.distributed`.
        connection = importlib.import_module(".connection", __package__)
        self.shards = connection.connected(self.device, group, axis)

    def unshard(self) -> None:
        """Leave the group of `shard`, without which the others cannot go on."""
        shards, self.shards = self.shards, None
        if shards is not None:
            shards.close()

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for work before a video: its errors end the wait of the other ranks."""
        return contextlib.nullcontext() if self.shards is None else self.shards.preparing()

    def agreed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest dtype of all ranks, each of which measures what is fast."""
        if self.shards is None:
            return dtype
        if self.shards.device != self.device:
            raise ValueError(
                f"the weights are on {self.device}, and the ranks were connected on "
                f"{self.shards.device}; expected `shard` after the move"
            )
        return self.shards.widest(dtype)
