"""The causal video VAE of Wan 2.1 and Qwen-Image, channels-last and streaming.

The names are imported when they are first used, so that the command line answers before PyTorch is
loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import load_vae
    from .config import VAEConfig
    from .model import VideoVAE

__all__ = ["VAEConfig", "VideoVAE", "load_vae"]

_HOMES = {"VAEConfig": "config", "VideoVAE": "model", "load_vae": "checkpoint"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
