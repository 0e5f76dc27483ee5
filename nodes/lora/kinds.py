"""LoHa, LoKr, GLoRA, OFT, BOFT, LoCon: ComfyUI's own adapters as functions of a weight.

A function keeps the form of an adapter; the bank stores its tensors, and each call builds it again.
ComfyUI logs that an adapter does not fit and goes on without it. Here this is found beforehand: a
new function is tried on a weight without values (on "meta"). An error in a run, as of memory, is
raised.
"""

import functools
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import comfy.lora
import comfy.weight_adapter
import torch
from comfy.weight_adapter.base import WeightAdapterBase
from torch import Tensor

from ...lora import WeightFunction, describe, spell

# ComfyUI's endings of keys where they differ from our names of parts.
_ENDINGS = {"up": "lora_up.weight", "down": "lora_down.weight", "mid": "lora_mid.weight"}
_ENDINGS |= {part: f"{part}.weight" for part in ("a1", "a2", "b1", "b2")}

# Kinds whose deltas do not depend on the weight.
_ADDED = ("lora", "loha", "lokr")

# Parts whose values ComfyUI reads when it loads them.
_NUMBERS = ("alpha", "reshape_weight")


def function_of(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> WeightFunction:
    """Return what ComfyUI does with the parts of a module, as `lora.OtherKinds`."""
    if "oft_blocks" in parts:  # the alpha of a rotation is its limit, 0: none; BOFT needs one
        parts = {"alpha": torch.tensor(0.0), **parts}
    grown = tuple(parts["reshape_weight"].tolist()) if "reshape_weight" in parts else shape
    try:
        parts = {name: _along(part, name, grown) for name, part in parts.items()}
        empty = {
            name: part if name in _NUMBERS else part.to("meta") for name, part in parts.items()
        }
        # The limit is compared with values, which "meta" has none of.
        empty |= {"alpha": torch.tensor(0.0)} if "alpha" in parts else {}
        _function(_adapter(empty)).apply(torch.empty(shape, device="meta"), 1.0)
    except Exception:
        raise ValueError(f"{describe(parts)} for a parameter of {spell(shape)}") from None
    # ComfyUI scales the weight by DoRA's magnitudes, and may pad it.
    fixed = not parts.keys() & {"dora_scale", "reshape_weight"}
    adapter = _adapter(parts)
    return _function(adapter, adds=fixed and adapter.name in _ADDED)


def _along(part: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return magnitudes or factors with the axes of the weight, which ComfyUI broadcasts."""
    if name not in ("dora_scale", "rescale"):
        return part
    is_out = name == "rescale" or (part.shape[:1] == shape[:1] and part.numel() == shape[0])
    sizes = [size if axis == (0 if is_out else 1) else 1 for axis, size in enumerate(shape)]
    return part.reshape(sizes)


def _adapter(parts: Mapping[str, Tensor]) -> WeightAdapterBase:
    """Return ComfyUI's adapter of all parts; a ValueError if it needs others."""
    file = {f"m.{_ENDINGS.get(part, part)}": tensor for part, tensor in parts.items()}
    alpha = file.pop("m.alpha").item() if "alpha" in parts else None
    dora_scale = file.pop("m.dora_scale", None)
    made = [
        kind.load("m", file, alpha, dora_scale, set()) for kind in comfy.weight_adapter.adapters
    ]
    (adapter,) = (each for each in made if each is not None)
    if adapter.loaded_keys != file.keys():
        raise ValueError("some parts are not used")
    return adapter


def _function(adapter: WeightAdapterBase, *, adds: bool = False) -> WeightFunction:
    tensors = tuple(each for each in adapter.weights if isinstance(each, Tensor))
    form = tuple(None if isinstance(each, Tensor) else (each,) for each in adapter.weights)
    function = functools.partial(_changed, kind=type(adapter), form=form)
    return WeightFunction(tensors, function, adds)


def _changed(
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    strength: float,
    *,
    kind: type[WeightAdapterBase],
    form: tuple[tuple | None, ...],
) -> Tensor:
    """Return a weight with an adapter; `form` has its numbers, and None for each of `tensors`."""
    rest = iter(tensors)
    adapter = kind(set(), tuple(next(rest) if each is None else each[0] for each in form))
    patch = strength, adapter, 1.0, None, None
    with nullcontext() if torch.compiler.is_compiling() else _raised():
        return comfy.lora.calculate_weight([patch], weight, "a weight", weight.dtype)


@contextmanager
def _raised() -> Iterator[None]:
    """Raise the errors that ComfyUI's adapters catch and log in the block."""
    found, thread = list[BaseException](), threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        if record.funcName != "calculate_weight" or record.thread != thread:
            return True
        found.append(sys.exc_info()[1] or RuntimeError(record.getMessage()))
        return False

    logging.getLogger().addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(is_other)
    if found:
        raise found[0]
