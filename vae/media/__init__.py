"""Reading and writing of video, audio and latent files.

Names are imported on first use: most of these files import PyTorch and PyAV.
"""

from importlib import import_module

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
    "video_writer": ("VideoWriter", "parts_of", "pictures_of"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
