"""The inputs of the nodes between video files and latents, and their tooltips."""

from typing import Any

from ...vae import media
from ..host.api import io
from ..host.widgets import AUTO, fps_input, once
from .target import FOLDERS

# What the choices of `DecodeVideo` mean for `VideoWriter`.
DEPTHS = {AUTO: None, "8": 8, "10": 10, "16": 16}
SWITCHES = {AUTO: None, "on": True, "off": False}

# VideoWriter's default: no visible loss on the output of a VAE.
QUALITY = 70

_DECODE = {
    "samples": "Latent of one video to decode.",
    "vae": "VAE to use. A VAE that is not fast decodes the whole video before writing starts and "
    "needs the memory for it.",
    "fps": "Frames per second of the file: 16 for Wan 2.1 and Wan 2.2 14B, 24 for Wan 2.2 5B. A "
    "higher value plays the same frames faster.",
    "codec": "h264 (mp4): plays everywhere. hevc (mp4), av1 (mp4), vp9 (webm): smaller files, "
    "slower to write. prores, prores4444 (mov): for editing. ffv1 (mkv): lossless, about 4 MB per "
    "frame of 1280 x 720. png, exr: a folder with an image per frame; exr is linear light in half "
    "floats. ffv1, png and exr take odd sizes too. All but ffv1 and exr open their workflow when "
    "they are dropped into ComfyUI.",
    "quality": "Quality in percent. 0: smallest file. 100: best picture. 70: no visible loss on "
    "the output of a VAE. ffv1, png and exr ignore it.",
    "filename_prefix": "Folder and start of the file name; a number is appended. %width%, "
    "%height%, %year% and similar placeholders are replaced.",
    "save_to": "output: the file is kept. temp: the file is deleted when ComfyUI restarts, for "
    "videos that other nodes process further.",
    "audio": "Audio for the file; the part beyond the end of the video is cut off. ffv1 and prores "
    "store it lossless.",
    "hardware": "Encode h264, hevc or av1 on the GPU: less work for the CPU, larger files at the "
    "same quality. Without a usable GPU encoder the CPU encodes, and the log says so.",
    "frames": "Range of frames to write, such as 40-80: counted from 0, both ends included. 40-: "
    "to the end. Empty: all. Frames are identical to those of the whole video; unneeded parts are "
    "not decoded.",
    "bit_depth": "Bits per color of the file. auto: 8 for h264, which plays everywhere; 10 for "
    "hevc, av1, vp9 and prores, for smooth skies and grading; 16 for ffv1, png and exr.",
    "dither": "Dither 8-bit files, so that smooth areas have no bands. auto: on for h264 and other "
    "lossy codecs, off for ffv1 and png.",
    "alpha": "Keep the alpha channel of a VAE that has one (RGBA). auto: if the codec stores it: "
    "prores4444, ffv1, png, exr. on: an error with other codecs. off: it is dropped.",
}

_ENCODE = {
    "video": "Video from Load Video or Trim Video, for example. Its full depth is read (8, 10, 12 "
    "or 16 bits), with the file's rotation and pixel aspect ratio applied. Height and width are "
    "center-cropped to multiples of 8 (Wan 2.2 5B, Qwen-Image 2.1: 16; the model of the 5B needs "
    "32), the length to 4 n + 1 frames.",
    "vae": "VAE to use. A VAE that is not fast encodes the whole video at once and needs the "
    "memory for it.",
    "fps": "Frames per second to encode; frames are repeated or skipped, never blended. 0: every "
    "frame of the video, or a constant rate if the frame rate varies.",
    "max_frames": "Maximum number of frames to encode, from the start of the video, cut to 4 n + "
    "1: 81 frames give 21 latent frames. 0: all.",
}


def decode_inputs() -> list[io.Input]:
    """Return the inputs of `DecodeVideo`, in an order in which saved workflows keep theirs."""
    text, optional = _DECODE, {"optional": True}
    advanced = optional | {"advanced": True}
    codecs, prefix, output = list(media.available_codecs()), "video/fast_vae", FOLDERS[0]
    depth: dict[str, Any] = {"display_name": "bit depth", "options": list(DEPTHS), "default": AUTO}
    switch: dict[str, Any] = advanced | {"options": list(SWITCHES), "default": AUTO}
    return [
        io.Latent.Input("samples", tooltip=text["samples"]),
        io.Vae.Input("vae", tooltip=text["vae"]),
        fps_input(text["fps"]),
        io.Combo.Input("codec", options=codecs, default="h264", tooltip=text["codec"]),
        io.Int.Input("quality", default=QUALITY, min=0, max=100, tooltip=text["quality"]),
        io.String.Input("filename_prefix", default=prefix, tooltip=text["filename_prefix"]),
        io.Combo.Input("save_to", options=[*FOLDERS], default=output, tooltip=text["save_to"]),
        io.Audio.Input("audio", tooltip=text["audio"], **optional),
        io.Boolean.Input("hardware", default=False, tooltip=text["hardware"], **advanced),
        io.String.Input("frames", default="", tooltip=text["frames"], **advanced),
        *once(),
        io.Combo.Input("bit_depth", tooltip=text["bit_depth"], **optional, **depth),
        io.Combo.Input("dither", tooltip=text["dither"], **switch),
        io.Combo.Input("alpha", tooltip=text["alpha"], **switch),
    ]


def encode_inputs() -> list[io.Input]:
    """Return the inputs of `EncodeVideo`."""
    text, rate = _ENCODE, {"default": 0.0, "min": 0.0, "max": 1000.0, "step": 0.01}
    limit = {"default": 0, "min": 0, "max": 1_000_000}
    return [
        io.Video.Input("video", tooltip=text["video"]),
        io.Vae.Input("vae", tooltip=text["vae"]),
        io.Float.Input("fps", optional=True, tooltip=text["fps"], **rate),
        _side("width", "height"),
        _side("height", "width"),
        io.Int.Input("max_frames", optional=True, tooltip=text["max_frames"], **limit),
        *once(),
    ]


def _side(name: str, other: str) -> io.Int.Input:
    text = (
        f"{name.capitalize()} in pixels. The video is resized to cover width and height, then "
        f"center-cropped. 0: from {other} and the aspect ratio; both 0: not resized."
    )
    return io.Int.Input(name, default=0, min=0, max=16384, step=8, optional=True, tooltip=text)
