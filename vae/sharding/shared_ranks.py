"""The processes that share the videos of a VAE, as its methods."""

import importlib
from typing import TYPE_CHECKING

import torch

from ..streaming.shards import StreamShards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedRanks:
    """The part of a VAE that says which processes share its videos.

    Attributes:
        device: Device of the weights.
        shards: The ranks that share each video, from `shard`; None: this process has all of it.
    """

    device: torch.device
    shards: StreamShards | None = None

    def shard(self, group: "ProcessGroup | None" = None, axis: str | None = None) -> None:
        """Share each video with other processes, each of which computes a part of every frame.

        All ranks make the same calls with the same inputs, and get the same results: those of one
        process except for rounding. If a rank ends, the others raise a `ShardError` that names it,
        and the group is of no more use. `devices` and `graphs` are not used.

        Args:
            group: The processes; None: all of `torch.distributed`.
            axis: What is divided, "rows" or "columns"; None: the longer side of each video.

        Raises:
            ValueError: There is no process group, this process is not in it, or the axis is
                unknown. A stream raises it too, for more ranks than rows or columns of a latent,
                and if autograd records.
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

    def agreed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest `dtype` of the ranks: each measures which is fast on its device."""
        return dtype if self.shards is None else self.shards.widest(dtype)
