"""The causal video VAEs of Wan, Qwen-Image and SeedVR2, channels-last and streaming.

Names are imported on first use, so that the command line answers before PyTorch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, build_vae, load_vae, read_checkpoint
    from .demo import CLIP_PATH, VAE_PATH
    from .model import VideoVAE
    from .models.config import SEEDVR2, LayoutError, VAEConfig
    from .models.executor import rechunk
    from .planning.device_memory import trim_heap
    from .round_trip import check_corrections, encode_corrected
    from .streaming.memory import ExhaustedError, retried
    from .streaming.options import StreamOptions
    from .streaming.precision import eager, fastest_decode_dtype
    from .streaming.resume import resumed
    from .streaming.source import Rereadable
    from .validation import check_finite

__all__ = [
    "CLIP_PATH",
    "SEEDVR2",
    "VAE_PATH",
    "Checkpoint",
    "ExhaustedError",
    "LayoutError",
    "Rereadable",
    "StreamOptions",
    "VAEConfig",
    "VideoVAE",
    "build_vae",
    "check_corrections",
    "check_finite",
    "eager",
    "encode_corrected",
    "fastest_decode_dtype",
    "load_vae",
    "read_checkpoint",
    "rechunk",
    "resumed",
    "retried",
    "trim_heap",
]

# In the order of their weight; those of models and streams are imported by the others too.
_HOMES = (
    *("demo", "streaming.options", "streaming.precision", "streaming.memory", "validation"),
    *("checkpoint", "round_trip", "planning.device_memory", "models.executor"),
    *("streaming.resume", "streaming.source", "models.config"),
)


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(f".{home}", __name__), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
