"""Reading and writing of video, audio and latent files.

Names are imported on first use: most of these files import PyTorch and PyAV.
"""
# ruff: noqa: F401 - exports

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..background_writer import BackgroundWriter
    from .atomic_file import whole_file
    from .audio import Audio, read_audio
    from .av_input import open_media
    from .codecs import (
        CODECS,
        available_codecs,
        check_size,
        codec_for,
        codec_named,
    )
    from .latent_file import load_latent, save_latent
    from .pictures import convert_pictures, with_channels
    from .video_reader import VideoFile, read_video
    from .video_writer import VideoWriter, frames_to_uint8, parts_of, pictures_of

_HOMES = {
    "Audio": "audio",
    "BackgroundWriter": ".background_writer",
    "CODECS": "codecs",
    "VideoFile": "video_reader",
    "VideoWriter": "video_writer",
    "pictures_of": "video_writer",
    "available_codecs": "codecs",
    "check_size": "codecs",
    "codec_for": "codecs",
    "codec_named": "codecs",
    "frames_to_uint8": "video_writer",
    "load_latent": "latent_file",
    "open_media": "av_input",
    "parts_of": "video_writer",
    "convert_pictures": "pictures",
    "read_audio": "audio",
    "read_video": "video_reader",
    "save_latent": "latent_file",
    "whole_file": "atomic_file",
    "with_channels": "pictures",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
