"""The causal video VAEs of Wan, Qwen-Image and SeedVR2, channels-last and streaming.

The names are imported when they are first used, so that the command line answers before PyTorch is
loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bench.chart import draw_chart
    from .bench.compare import Contestant, compare, device_label
    from .bench.content import Clip, fitted, moving_pictures, random_latent
    from .bench.measure import Gauge
    from .bench.report import Benchmark, dtype_label, tasks_of
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

__all__ = [
    "CLIP_PATH",
    "CODECS",
    "SEEDVR2",
    "VAE_PATH",
    "Audio",
    "Benchmark",
    "Checkpoint",
    "Clip",
    "Contestant",
    "Gauge",
    "Handoff",
    "LayoutError",
    "Relief",
    "VAEConfig",
    "VideoFile",
    "VideoVAE",
    "VideoWriter",
    "available_codecs",
    "build_vae",
    "check_size",
    "codec_named",
    "compare",
    "device_label",
    "draw_chart",
    "dtype_label",
    "eager",
    "fitted",
    "frames_to_uint8",
    "load_vae",
    "moving_pictures",
    "open_media",
    "random_latent",
    "read_checkpoint",
    "read_video",
    "tasks_of",
    "trim_heap",
]

_HOMES = {
    "CLIP_PATH": "demo",
    "CODECS": "media.codecs",
    "SEEDVR2": "models.config",
    "VAE_PATH": "demo",
    "Audio": "media.audio",
    "Benchmark": "bench.report",
    "Checkpoint": "checkpoint",
    "Clip": "bench.content",
    "Contestant": "bench.compare",
    "Gauge": "bench.measure",
    "Handoff": "media.background_writer",
    "LayoutError": "models.config",
    "Relief": "layers.oom",
    "VAEConfig": "models.config",
    "VideoFile": "media.video_reader",
    "VideoVAE": "model",
    "VideoWriter": "media.video_writer",
    "available_codecs": "media.codecs",
    "build_vae": "checkpoint",
    "check_size": "media.codecs",
    "codec_named": "media.codecs",
    "compare": "bench.compare",
    "device_label": "bench.compare",
    "draw_chart": "bench.chart",
    "dtype_label": "bench.report",
    "eager": "streaming.compile_guard",
    "fitted": "bench.content",
    "frames_to_uint8": "media.video_writer",
    "load_vae": "checkpoint",
    "moving_pictures": "bench.content",
    "open_media": "media.av_input",
    "random_latent": "bench.content",
    "read_checkpoint": "checkpoint",
    "read_video": "media.video_reader",
    "tasks_of": "bench.report",
    "trim_heap": "planning.device_memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
