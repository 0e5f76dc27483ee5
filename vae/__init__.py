"""The causal video VAEs of Wan, Qwen-Image and SeedVR2, channels-last and streaming.

The names are imported when they are first used, so that the command line answers before PyTorch is
loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, build_vae, load_vae, read_checkpoint
    from .demo import CLIP_PATH, VAE_PATH
    from .layers.oom import Relief
    from .model import VideoVAE
    from .models.config import SEEDVR2, LayoutError, VAEConfig
    from .planning.device_memory import trim_heap
    from .streaming.options import StreamOptions
    from .streaming.session import eager, rechunk

__all__ = [
    "CLIP_PATH",
    "SEEDVR2",
    "VAE_PATH",
    "Checkpoint",
    "LayoutError",
    "Relief",
    "StreamOptions",
    "VAEConfig",
    "VideoVAE",
    "build_vae",
    "eager",
    "load_vae",
    "read_checkpoint",
    "rechunk",
    "trim_heap",
]

_HOMES = {
    "CLIP_PATH": "demo",
    "SEEDVR2": "models.config",
    "VAE_PATH": "demo",
    "Checkpoint": "checkpoint",
    "LayoutError": "models.config",
    "Relief": "layers.oom",
    "StreamOptions": "streaming.options",
    "VAEConfig": "models.config",
    "VideoVAE": "model",
    "build_vae": "checkpoint",
    "eager": "streaming.session",
    "load_vae": "checkpoint",
    "read_checkpoint": "checkpoint",
    "rechunk": "streaming.session",
    "trim_heap": "planning.device_memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
