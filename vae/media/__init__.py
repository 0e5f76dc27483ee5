"""Reading and writing of video, audio and latent files.

Names are imported on first use: most of these files import PyTorch and PyAV.
"""
# ruff: noqa: F401 - exports

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..background_writer import BackgroundWriter
    from .atomic_file import whole_file
    from .audio import Audio, Sound, layout_of, read_audio
    from .av_input import open_media
    from .codecs import CODECS, available_codecs, check_size, codec_named, sound_encoder
    from .joining import join_parts
    from .latent_file import load_latent, save_latent
    from .pictures import convert_pictures, with_channels
    from .video_reader import VideoFile, read_video
    from .video_writer import VideoWriter, frames_to_uint8, parts_of, pictures_of

_HOMES = {
    ".background_writer": ("BackgroundWriter",),
    "atomic_file": ("whole_file",),
    "audio": ("Audio", "Sound", "layout_of", "read_audio"),
    "av_input": ("open_media",),
    "codecs": ("CODECS", "available_codecs", "check_size", "codec_named", "sound_encoder"),
    "joining": ("join_parts",),
    "latent_file": ("load_latent", "save_latent"),
    "pictures": ("convert_pictures", "with_channels"),
    "video_reader": ("VideoFile", "read_video"),
    "video_writer": ("VideoWriter", "frames_to_uint8", "parts_of", "pictures_of"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
