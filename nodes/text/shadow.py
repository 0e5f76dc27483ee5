"""A text encoder that shares the weights of ComfyUI's own, with some parts replaced.

ComfyUI's modules are not modified, so a failed call leaves nothing behind, and clones of a CLIP,
which share the modules, do not affect each other.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from comfy.sd1_clip import SDClipModel
from torch import Tensor, nn

from ...kernels import first_line

_logger = logging.getLogger(__name__)

_compiling = {"works": True}


def shadow(module: nn.Module, replace: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Return a module of the same class and weights with some of its parts replaced, or itself."""
    replacement = replace(module)
    if replacement is not None:
        return replacement
    parts = {
        name: None if part is None else shadow(part, replace)
        for name, part in module._modules.items()
    }
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    return with_parts(module, parts)


def with_parts(module: nn.Module, parts: dict[str, nn.Module | None]) -> nn.Module:
    """Return a module with the class and weights of `module`, and other `parts`."""
    copy = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(parts)
    return copy


def ready(
    encoder: SDClipModel, dtype: torch.dtype | None, compiled: bool
) -> tuple[SDClipModel, bool]:
    """Return an encoder in `dtype` (None: ComfyUI's), and whether it has compiled blocks."""
    transformer = encoder.transformer
    if compiled and _compiling["works"]:
        blocks = _blocks(transformer)
        transformer = shadow(
            transformer, lambda part: _Compiled(part) if id(part) in blocks else None
        )
    is_compiled = transformer is not encoder.transformer
    if dtype is not None:
        transformer = _InDtype(transformer, dtype)
    if transformer is encoder.transformer:
        return encoder, False
    return with_parts(encoder, {**encoder._modules, "transformer": transformer}), is_compiled


def give_up_compiling(error: Exception) -> None:
    """Disable compilation in this process, and log `error`."""
    _compiling["works"] = False
    _logger.warning(
        "Fast Video VAE: torch.compile fails, the text encoder runs without it: %s: %s",
        type(error).__name__,
        first_line(error),
    )


def _blocks(module: nn.Module) -> set[int]:
    """Return the ids of equal modules in a list, outermost first; hooks exclude a module."""
    if isinstance(module, nn.ModuleList) and len(module) > 1 and len(set(map(type, module))) == 1:
        return {
            id(part) for part in module if not part._forward_hooks and not part._forward_pre_hooks
        }
    return set().union(*(_blocks(part) for part in module.children()))


class _Compiled(nn.Module):
    """A block with a forward that is compiled once for all blocks of its class."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the block."""
        return _compiled(type(self.block))(self.block, *args, **kwargs)


@functools.cache
def _compiled(kind: type[nn.Module]) -> Callable[..., Any]:
    return torch.compile(kind.forward)


class _InDtype(nn.Module):
    """A transformer with activations in another dtype."""

    def __init__(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer, self._dtype = transformer, dtype

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("transformer"), name)

    def forward(self, *args: Any, embeds: Tensor, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the transformer."""
        kwargs["dtype"] = self._dtype
        return self.transformer(*args, embeds=embeds.to(self._dtype), **kwargs)
