"""Find the one network of a kind in a checkpoint, under any prefix and in any nested dict.

Training and merged checkpoints have other entries too: other models, losses, an optimizer. They are
left out by their names, and their values are not read.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import shown

# Dicts in dicts, of which a hostile pickle can have a hundred thousand.
_MOST_NESTED = 8
_MOST_NETWORKS = 8

# Names of the modules that PyTorch puts around others.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

_DECODER = "decoder."


class Network(NamedTuple):
    """How the entries of a network are recognised.

    Attributes:
        anchors: Keys of the decoder that no other network has, one for each way to name them.
        parts: How the keys of the network begin.
    """

    anchors: tuple[str, ...]
    parts: tuple[str, ...]

    def places(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return each prefix with an anchor, and the keys behind it by the names in `names`."""
        names = list(names)
        prefixes: dict[str, dict[str, str]] = {}
        for name in names:
            prefix = name[: max(0, name.rfind(_DECODER))]
            if _key(name, prefix) in self.anchors and (not prefix or prefix[-1] == "."):
                prefixes[prefix] = {}
        if len(prefixes) > _MOST_NETWORKS:
            raise ValueError(f"it holds {len(prefixes)} networks; expected one")
        for prefix, keys in prefixes.items():
            for name in names:
                if name.startswith(prefix) and _key(name, prefix).startswith(self.parts):
                    keys[name] = _key(name, prefix)
            check_different(keys)
        return prefixes

    def take(self, entries: Mapping[str, object]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the network without its prefix, and the names of the other entries.

        Several are an error unless they are equal. There is nothing in it if there is no anchor.
        """
        first: dict[str, Tensor] = {}
        places = self.places(entries)
        for prefix, keys in places.items():
            network = _checked({key: entries[name] for name, key in keys.items()})
            first = first or network
            if not _equal(network, first):
                one, other = (each[:-1] or "its root" for each in (next(iter(places)), prefix))
                raise ValueError(
                    f"it holds different networks, at {shown(one, 24)} and {shown(other, 24)}; "
                    "expected one"
                )
        used = next(iter(places.values()), {})
        return first, [name for name in entries if name not in used]


def flattened(content: Mapping[Any, Any]) -> dict[str, object]:
    """Return the entries of nested dicts under the joined keys, such as `ema.state_dict.a`."""
    entries: dict[str, object] = {}
    seen: set[int] = set()

    def visit(prefix: str, nested: Mapping[Any, Any], depth: int) -> None:
        seen.add(id(nested))  # a pickle can have a dict in itself, or in a thousand others
        for key, value in nested.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and depth < _MOST_NESTED:
                if id(value) not in seen:
                    visit(f"{name}.", value, depth + 1)
                continue
            if name in entries:
                raise ValueError(f"two of its entries are named {shown(name)}; expected one")
            entries[name] = value if isinstance(key, str) else None

    visit("", content, 0)
    if entries and not any(isinstance(value, Tensor) for value in entries.values()):
        raise ValueError(f"it has no tensor, but {shown(min(entries))}; expected names and tensors")
    return entries


def check_different(names: Mapping[str, str]) -> None:
    """Refuse two keys with the same meaning."""
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise ValueError(f"{shown(key)} and {shown(first[name])} both mean {shown(name)}")


def _key(name: str, prefix: str) -> str:
    return _WRAPPERS.sub("", name[len(prefix) :])


def _checked(network: Mapping[str, object]) -> dict[str, Tensor]:
    """Refuse tensors without their own data, before anything of their size is allocated."""
    tensors: dict[str, Tensor] = {}
    for key, value in network.items():
        if not isinstance(value, Tensor):
            kind = f"a {type(value).__name__}"
        elif value.is_nested:
            kind = "nested"
        elif value.layout != torch.strided:
            kind = "sparse"
        elif value.is_quantized:
            kind = "quantised"
        elif value.is_meta:
            kind = "on the meta device, without numbers"
        elif not value.numel():
            kind = f"{list(value.shape)}, which holds nothing"
        elif any(
            not step and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)
        ):
            kind = "expanded from fewer numbers"
        else:
            tensors[key] = value
            continue
        raise ValueError(f"{shown(key)} is {kind}; expected plain tensors")
    return tensors


def _equal(network: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return network is other or (
        network.keys() == other.keys()
        and all(
            value.dtype == other[key].dtype and torch.equal(value, other[key])
            for key, value in network.items()
        )
    )
