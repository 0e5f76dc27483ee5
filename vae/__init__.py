"""The causal video VAEs of Wan, Qwen-Image and SeedVR2, channels-last and streaming.

The names are imported when they are first used, so that the command line answers before PyTorch is
loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, build_vae, load_vae, read_checkpoint
    from .compiling import eager
    from .config import SEEDVR2, LayoutError, VAEConfig
    from .demo import CLIP_PATH, VAE_PATH
    from .media import VideoFile, read_video
    from .model import VideoVAE

__all__ = [
    "CLIP_PATH",
    "SEEDVR2",
    "VAE_PATH",
    "Checkpoint",
    "LayoutError",
    "VAEConfig",
    "VideoFile",
    "VideoVAE",
    "build_vae",
    "eager",
    "load_vae",
    "read_checkpoint",
    "read_video",
]

_HOMES = {
    "CLIP_PATH": "demo",
    "SEEDVR2": "config",
    "VAE_PATH": "demo",
    "Checkpoint": "checkpoint",
    "LayoutError": "config",
    "VAEConfig": "config",
    "VideoFile": "media",
    "VideoVAE": "model",
    "build_vae": "checkpoint",
    "eager": "compiling",
    "load_vae": "checkpoint",
    "read_checkpoint": "checkpoint",
    "read_video": "media",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
