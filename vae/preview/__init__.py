"""Pictures of latents in a fraction of a decode's time: tiny decoders, and latent-to-RGB factors.

Names are imported on first use: these files import PyTorch.
"""
# ruff: noqa: F401 - exports

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .latent_rgb import rgb_of_latent
    from .tiny_checkpoint import load_tiny_decoder
    from .tiny_decoder import TinyDecoder

_HOMES = {
    "TinyDecoder": "tiny_decoder",
    "load_tiny_decoder": "tiny_checkpoint",
    "rgb_of_latent": "latent_rgb",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
