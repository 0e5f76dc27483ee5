"""Cache of encoded prompts with a limit on number and memory.

Nodes may write into the tensors of a conditioning. So the cache shares none with its callers: it
stores a copy, and returns copies.
"""

import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

# ComfyUI's CONDITIONING: pairs of `[1, tokens, channels]` and a dict of other values.
Conditioning = list[list[Any]]

MOST_BYTES = 256 << 20


class TextCache:
    """Conditionings by text encoder and prompt; the least recently used are dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        # The oldest use first.
        self._entries: dict[tuple[Hashable, ...], Conditioning] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Hashable, ...]) -> Conditioning | None:
        """Return a copy of the conditioning of `key`; None: it is not in the cache."""
        for each in list(self._entries):
            if any(isinstance(part, weakref.ref) and part() is None for part in each):
                self._drop(each)
        if key not in self._entries:
            return None
        self._entries[key] = self._entries.pop(key)
        return copied(self._entries[key])

    def put(self, key: tuple[Hashable, ...], conditioning: Conditioning, most: int) -> None:
        """Store a copy of a conditioning, and drop the oldest entries above `most`."""
        self._drop(key)
        self._entries[key] = copied(conditioning)
        self.nbytes += nbytes(conditioning)
        while self._entries and (len(self) > most or self.nbytes > self._most_bytes):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        self.nbytes -= nbytes(self._entries.pop(key, None))


def copied(value: Any) -> Any:  # noqa: ANN401
    """Return a conditioning, or a part of it, in new containers and tensors; hooks are shared."""
    return pytree.tree_map_only(Tensor, Tensor.clone, value)


def nbytes(value: object) -> int:
    """Return the bytes of all tensors of a conditioning, or of a part of it."""
    return sum(each.nbytes for each in pytree.tree_leaves(value) if isinstance(each, Tensor))
