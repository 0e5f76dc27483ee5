"""Cache of encoded prompts with a limit on number and memory."""

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any

from torch import Tensor

# ComfyUI's CONDITIONING: pairs of `[1, tokens, channels]` and a dict of other values.
Conditioning = list[list[Any]]

MOST_BYTES = 256 << 20


class TextCache:
    """Conditionings by text encoder and prompt; the least recently used are dropped.

    Attributes:
        nbytes: Bytes of all tensors.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Hashable, ...], Conditioning] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Hashable, ...]) -> Conditioning | None:
        """Return the conditioning of `key`; tensors are shared, lists and dicts are copied."""
        with self._lock:
            self._forget_the_dead()
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return copied(found)

    def put(self, key: tuple[Hashable, ...], conditioning: Conditioning, most: int) -> None:
        """Store a conditioning.

        Args:
            key: Its key; when a weak reference in it has died, the entry is dropped.
            conditioning: The conditioning.
            most: Most entries of the cache.
        """
        with self._lock:
            self._forget_the_dead()
            self._drop(key)
            self._entries[key] = copied(conditioning)
            self.nbytes += nbytes(conditioning)
            while self._entries and (len(self) > most or self.nbytes > self._most_bytes):
                self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self.nbytes -= nbytes(dropped)

    def _forget_the_dead(self) -> None:
        for key in list(self._entries):
            if any(isinstance(part, weakref.ref) and part() is None for part in key):
                self._drop(key)


def copied(conditioning: Conditioning) -> Conditioning:
    """Return `conditioning` with its tensors in new lists and dicts, which nodes may change."""
    return [[states, dict(rest)] for states, rest in conditioning]


def nbytes(conditioning: Conditioning) -> int:
    """Return the bytes of the tensors of `conditioning`."""
    tensors = [each for states, rest in conditioning for each in (states, *rest.values())]
    return sum(each.nbytes for each in tensors if isinstance(each, Tensor))
