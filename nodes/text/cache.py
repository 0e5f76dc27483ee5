"""Cache of encoded prompts with a limit on number and memory.

Nodes may write into the tensors of a conditioning. So the cache shares none with its callers: it
stores a copy, and returns copies.
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from threading import Lock
from typing import Any

from torch import Tensor

# ComfyUI's CONDITIONING: pairs of `[1, tokens, channels]` and a dict of other values.
Conditioning = list[list[Any]]

MOST_BYTES = 256 << 20


class TextCache:
    """Conditionings by text encoder and prompt; the least recently used are dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[Hashable, ...], Conditioning] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Hashable, ...]) -> Conditioning | None:
        """Return a copy of the conditioning of `key`; None: it is not in the cache."""
        with self._lock:
            self._forget_the_dead()
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
        return copied(found)

    def put(self, key: tuple[Hashable, ...], conditioning: Conditioning, most: int) -> None:
        """Store a copy of a conditioning, and drop the oldest entries above `most`."""
        stored = copied(conditioning)
        with self._lock:
            self._forget_the_dead()
            self._drop(key)
            self._entries[key] = stored
            self.nbytes += nbytes(stored)
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


def copied(value: Any) -> Any:  # noqa: ANN401
    """Return a conditioning, or a part of it, with new lists, dicts, tuples and tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        twin = copy.copy(value)  # keeps the class
        for key, each in value.items():
            twin[key] = copied(each)
        return twin
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = map(copied, value)
        return twin
    if type(value) is tuple:
        return tuple(map(copied, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(copied, value))
    return value  # hooks, for example, are shared


def nbytes(conditioning: Conditioning) -> int:
    """Return the bytes of all tensors of `conditioning`, also in lists, dicts and tuples."""
    return sum(each.nbytes for each in _tensors(conditioning))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
