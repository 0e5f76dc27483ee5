"""The causal video VAEs of Wan, Qwen-Image and SeedVR2, channels-last and streaming.

The names are imported when they are first used, so that the command line answers before PyTorch is
loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bench import Contestant, compare, device_label
    from .bench_chart import draw_chart
    from .bench_content import Clip, fitted, moving_pictures, random_latent
    from .bench_report import Benchmark, dtype_label, tasks_of
    from .checkpoint import Checkpoint, build_vae, load_vae, read_checkpoint
    from .codecs import CODECS, available_codecs, check_size, codec_named
    from .compiling import eager
    from .config import SEEDVR2, LayoutError, VAEConfig
    from .demo import CLIP_PATH, VAE_PATH
    from .demux import open_media
    from .gauge import Gauge
    from .handoff import Handoff
    from .heap import trim_heap
    from .media import VideoFile, read_video
    from .model import VideoVAE
    from .relief import Relief
    from .sound import Audio
    from .writer import VideoWriter, frames_to_uint8

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
    "CODECS": "codecs",
    "SEEDVR2": "config",
    "VAE_PATH": "demo",
    "Audio": "sound",
    "Benchmark": "bench_report",
    "Checkpoint": "checkpoint",
    "Clip": "bench_content",
    "Contestant": "bench",
    "Gauge": "gauge",
    "Handoff": "handoff",
    "LayoutError": "config",
    "Relief": "relief",
    "VAEConfig": "config",
    "VideoFile": "media",
    "VideoVAE": "model",
    "VideoWriter": "writer",
    "available_codecs": "codecs",
    "build_vae": "checkpoint",
    "check_size": "codecs",
    "codec_named": "codecs",
    "compare": "bench",
    "device_label": "bench",
    "draw_chart": "bench_chart",
    "dtype_label": "bench_report",
    "eager": "compiling",
    "fitted": "bench_content",
    "frames_to_uint8": "writer",
    "load_vae": "checkpoint",
    "moving_pictures": "bench_content",
    "open_media": "demux",
    "random_latent": "bench_content",
    "read_checkpoint": "checkpoint",
    "read_video": "media",
    "tasks_of": "bench_report",
    "trim_heap": "heap",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
