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
    from .media.audio import Audio
    from .media.av_input import open_media
    from .media.background_writer import Handoff
    from .media.codecs import CODECS, available_codecs, check_size, codec_named
    from .media.video_reader import VideoFile, read_video
    from .media.video_writer import VideoWriter, frames_to_uint8
    from .model import VideoVAE
    from .models.config import SEEDVR2, LayoutError, VAEConfig
    from .planning.device_memory import trim_heap
    from .streaming.compile_guard import eager
    from .streaming.options import StreamOptions
    from .streaming.pipeline import rechunk

__all__ = [
    "CLIP_PATH",
    "CODECS",
    "SEEDVR2",
    "VAE_PATH",
    "Audio",
    "Checkpoint",
    "Handoff",
    "LayoutError",
    "Relief",
    "StreamOptions",
    "VAEConfig",
    "VideoFile",
    "VideoVAE",
    "VideoWriter",
    "available_codecs",
    "build_vae",
    "check_size",
    "codec_named",
    "eager",
    "frames_to_uint8",
    "load_vae",
    "open_media",
    "read_checkpoint",
    "read_video",
    "rechunk",
    "trim_heap",
]

_HOMES = {
    "CLIP_PATH": "demo",
    "CODECS": "media.codecs",
    "SEEDVR2": "models.config",
    "VAE_PATH": "demo",
    "Audio": "media.audio",
    "Checkpoint": "checkpoint",
    "Handoff": "media.background_writer",
    "LayoutError": "models.config",
    "Relief": "layers.oom",
    "StreamOptions": "streaming.options",
    "VAEConfig": "models.config",
    "VideoFile": "media.video_reader",
    "VideoVAE": "model",
    "VideoWriter": "media.video_writer",
    "available_codecs": "media.codecs",
    "build_vae": "checkpoint",
    "check_size": "media.codecs",
    "codec_named": "media.codecs",
    "eager": "streaming.compile_guard",
    "frames_to_uint8": "media.video_writer",
    "load_vae": "checkpoint",
    "open_media": "media.av_input",
    "read_checkpoint": "checkpoint",
    "read_video": "media.video_reader",
    "rechunk": "streaming.pipeline",
    "trim_heap": "planning.device_memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
