"""Find the one network of a kind in a checkpoint, under any prefix and in any nested dict.

Other entries, of training or of other models, are left out by name; their values are not read.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import shown

# Characters of the keys around nested entries: a hostile pickle can have 100,000 dicts in each
# other. Networks: each of them visits all names.
_MOST_AROUND, _MOST_NETWORKS = 200, 8


# What PyTorch adds to the names of compiled and distributed parts.
_WRAPPERS = re.compile(r"_orig_mod\.|(?<=\.)module\.")


class Network(NamedTuple):
    """The keys of a network: some that no other one has, by which it is found, and its parts."""

    anchors: tuple[str, ...]  # of the decoder, in each way to name them
    parts: tuple[str, ...]  # beginnings of all keys

    def places(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the prefix of each such network, and its keys by the names of entries."""
        bare = {name: _WRAPPERS.sub("", name) for name in names}
        found: dict[str, dict[str, str]] = {
            name.removesuffix(anchor): {}
            for name in bare.values()
            for anchor in self.anchors
            if f".{name}".endswith(f".{anchor}")
        }
        if len(found) > _MOST_NETWORKS:
            raise ValueError(f"it holds {len(found)} networks; expected one")
        for prefix, keys in found.items():
            starts = tuple(prefix + part for part in self.parts)
            keys.update((k, v[len(prefix) :]) for k, v in bare.items() if v.startswith(starts))
            check_different(keys)
        return found

    def take(self, entries: Mapping[str, object]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the network without its prefix, empty if there is none, and all other names."""
        places = self.places(entries)
        found = {
            prefix: {key: _checked(name, entries[name]) for name, key in keys.items()}
            for prefix, keys in places.items()
        }
        first, *others = found or [""]
        for other in others:
            one, two = found[first], found[other]
            if one.keys() != two.keys() or any(
                value.dtype != two[key].dtype or not torch.equal(value, two[key])
                for key, value in one.items()
            ):
                ends = " and ".join(shown(each[:-1] or "its root", 24) for each in (first, other))
                raise ValueError(f"it has different networks, at {ends}; expected one")
        return found.get(first, {}), [name for name in entries if name not in places.get(first, ())]


def flattened(content: Mapping[Any, Any]) -> dict[str, object]:
    """Return the entries of nested dicts under joined keys, such as `ema.state_dict.a`."""
    entries: dict[str, object] = {}
    nested, seen = [("", content)], {id(content)}
    for around, each in nested:
        for key, value in each.items():
            name = f"{around}{key}" if around else str(key)
            if isinstance(value, Mapping) and len(name) < _MOST_AROUND:
                if id(value) not in seen:  # a pickle can have a dict in itself, or in many others
                    seen.add(id(value))
                    nested.append((f"{name}.", value))
            elif name in entries:
                raise ValueError(f"two of its entries are named {shown(name)}; expected one")
            else:
                entries[name] = value if isinstance(key, str) else None
    if entries and not any(isinstance(value, Tensor) for value in entries.values()):
        raise ValueError(f"it has no tensor, but {shown(min(entries))}; expected names and tensors")
    return entries


def check_different(names: Mapping[str, str]) -> None:
    """Refuse two keys with the same meaning."""
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise ValueError(f"{shown(key)} and {shown(first[name])} both mean {shown(name)}")


def _checked(key: str, value: object) -> Tensor:
    """Return an aligned tensor; refuse one without its own data, before its size is allocated."""
    if not isinstance(value, Tensor):
        kind = f"a {type(value).__name__}"
    elif value.is_nested or value.is_quantized or value.layout != torch.strided:
        kind = "nested, sparse or quantised"
    elif value.is_meta:
        kind = "on the meta device, without numbers"
    elif not value.numel():
        kind = f"{list(value.shape)}, which holds nothing"
    elif any(
        step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)
    ):
        kind = "expanded from fewer numbers"
    # Vector instructions of some processors need what old files do not align.
    elif value.data_ptr() % value.itemsize:
        return value.clone()
    else:
        return value
    raise ValueError(f"{shown(key)} is {kind}; expected plain tensors")
