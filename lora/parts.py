"""The parts of one module in a file: whether they fit and are valid, and the scale of a pair."""

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .deltas import as_matrix, spell


def misfit(shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> str | None:
    """Return why a pair or whole weight does not fit `shape`; None: it fits, or is another kind."""
    whole = shapes.get("diff", shapes.get("set_weight"))
    if whole is not None:
        same = whole == shape
        return None if same else f"a difference of {spell(whole)} for a parameter of {spell(shape)}"
    if not {"up", "down"} <= shapes.keys() or {"mid", "reshape_weight"} & shapes.keys():
        return None
    up, down = shapes["up"], shapes["down"]
    if not up or not down:
        return f"a pair of {spell(up)} and {spell(down)}"
    size = up[0], math.prod(down[1:])
    if len(shape) < 2 or size != as_matrix(shape):
        return f"a pair for {spell(size)} and a parameter of {spell(shape)}"
    if math.prod(shapes.get("magnitude", shape[:1])) != shape[0]:
        return f"magnitudes of {spell(shapes['magnitude'])} for a parameter of {spell(shape)}"
    return None


def check_values(name: str, tensor: Tensor, where: str) -> None:
    """Refuse a part `[...]` without values, of integers, or with numbers that are not finite."""
    if tensor.numel() == 0:
        raise ValueError(f"{where}: {name} has the shape {list(tensor.shape)}; expected values")
    if name == "alpha":
        if tensor.numel() != 1 or not math.isfinite(tensor.item()):
            value = tensor.item() if tensor.numel() == 1 else list(tensor.shape)
            raise ValueError(f"{where}: alpha is {value}; expected one finite number")
        return
    if name == "reshape_weight":
        return
    if not tensor.is_floating_point():
        raise ValueError(f"{where}: {name} is {tensor.dtype}; expected floating point")
    values = tensor.float() if tensor.element_size() == 1 else tensor  # no arithmetic in float8
    for bound in torch.stack(torch.aminmax(values)).tolist():
        if not math.isfinite(bound):
            raise ValueError(f"{where}: {name} holds {bound}; expected finite numbers")


def check_pair(parts: Mapping[str, Tensor], where: str) -> None:
    """Refuse half a pair, and one whose ranks differ."""
    for name in ("up", "down"):
        if name not in parts:
            raise ValueError(f"{where}: {', '.join(parts)} without {name}; expected all of them")
        if parts[name].ndim < 2:
            shape = f"{where}: {name} has the shape {list(parts[name].shape)}"
            raise ValueError(f"{shape}; expected two dimensions")
    up, down = parts["up"], parts["down"]
    if (width := math.prod(up.shape[1:])) != len(down):
        ranks = f"up has rank {width}, down has rank {len(down)}"
        raise ValueError(f"{where}: {ranks}; expected the same rank")


class Scales:
    """Scales in the metadata of a file: PEFT's configuration, as diffusers writes it."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        known: dict[str, object] = dict(metadata)
        for name in ("lora_adapter_metadata", "adapter_config", "peft_config", "ss_network_args"):
            try:
                value = json.loads(metadata.get(name, "{}"), parse_int=_whole)
            except (ValueError, RecursionError):
                value = {}
            if isinstance(value, dict):
                known |= {str(key).rpartition(".")[2]: each for key, each in value.items()}
        self.stabilised = str(known.get("use_rslora", "")).lower() in ("true", "1")
        try:
            self.given_alpha = float(known["lora_alpha"])  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError, OverflowError):
            self.given_alpha = None

    def complete(self, parts: dict[str, Tensor]) -> None:
        """Give a pair its alpha, for the scale alpha / rank."""
        alpha, rank = parts.get("alpha", self.given_alpha), len(parts["down"])
        if alpha is not None:
            parts["alpha"] = torch.as_tensor(alpha).float() * (rank**0.5 if self.stabilised else 1)


def _whole(digits: str) -> int | float:
    """Parse an integer; a long one becomes a float: Python takes minutes for a million digits."""
    return int(digits) if len(digits) < 20 else float(digits)
