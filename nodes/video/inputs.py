"""The inputs of the nodes between video files and latents."""

from ...vae import media
from ..host.api import io
from ..host.widgets import AUTO, fps_input
from .target import FOLDERS

_ON = "on"

# VideoWriter's default: no visible loss on the output of a VAE.
QUALITY = 70


def file_inputs() -> list[io.Input]:
    """Return the inputs of `DecodeVideo` for the file."""
    return [
        fps_input(
            "Frames per second of the file: 16 for Wan 2.1 and Wan 2.2 14B, 24 for Wan 2.2 5B. A "
            "higher value plays the same frames faster."
        ),
        io.Combo.Input(
            "codec",
            options=list(media.available_codecs()),
            default="h264",
            tooltip="h264 (mp4): plays everywhere. hevc (mp4), av1 (mp4), vp9 (webm): smaller "
            "files, slower to write. prores, prores4444 (mov): for editing. ffv1 (mkv): lossless, "
            "about 4 MB per frame of 1280 x 720. png, exr: a folder with an image per frame; exr "
            "is linear light in half floats. ffv1, png and exr take odd sizes too. All but ffv1 "
            "and exr open their workflow when they are dropped into ComfyUI.",
        ),
        io.Int.Input(
            "quality",
            default=QUALITY,
            min=0,
            max=100,
            tooltip="Quality in percent. 0: smallest file. 100: best picture. 70: no visible "
            "loss on the output of a VAE. ffv1, png and exr ignore it.",
        ),
        io.String.Input(
            "filename_prefix",
            default="video/fast_vae",
            tooltip="Folder and start of the file name; a number is appended. %width%, %height%, "
            "%year% and similar placeholders are replaced.",
        ),
        io.Combo.Input(
            "save_to",
            options=list(FOLDERS),
            default=FOLDERS[0],
            tooltip="output: the file is kept. temp: the file is deleted when ComfyUI restarts, "
            "for videos that other nodes process further.",
        ),
    ]


def depth_inputs() -> list[io.Input]:
    """Return the inputs of `DecodeVideo` that came last, so that saved workflows keep theirs."""
    return [
        io.Combo.Input(
            "bit_depth",
            options=[AUTO, "8", "10", "16"],
            default=AUTO,
            display_name="bit depth",
            optional=True,
            tooltip="Bits per color of the file. auto: 8 for h264, which plays everywhere; 10 for "
            "hevc, av1, vp9 and prores, for smooth skies and grading; 16 for ffv1, png and exr.",
        ),
        _switch(
            "dither",
            "Dither 8-bit files, so that smooth areas have no bands. auto: on for h264 and other "
            "lossy codecs, off for ffv1 and png.",
        ),
        _switch(
            "alpha",
            "Keep the alpha channel of a VAE that has one (RGBA). auto: if the codec stores it: "
            "prores4444, ffv1, png, exr. on: an error with other codecs. off: it is dropped.",
        ),
    ]


def chosen(value: str) -> bool | None:
    """Return the meaning of a `value` of `dither` or `alpha`; None: auto."""
    return None if value == AUTO else value == _ON


def _switch(name: str, tooltip: str) -> io.Combo.Input:
    options = [AUTO, _ON, "off"]
    return io.Combo.Input(
        name, options=options, default=AUTO, optional=True, advanced=True, tooltip=tooltip
    )


def video_inputs() -> list[io.Input]:
    """Return the inputs of `EncodeVideo` for the frames."""
    return [
        io.Float.Input(
            "fps",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.01,
            optional=True,
            tooltip="Frames per second to encode; frames are repeated or skipped, never blended. "
            "0: every frame of the video, or a constant rate if the frame rate varies.",
        ),
        *(
            io.Int.Input(
                name,
                default=0,
                min=0,
                max=16384,
                step=8,
                optional=True,
                tooltip=f"{name.capitalize()} in pixels. The video is resized to cover width and "
                f"height, then center-cropped. 0: from {other} and the aspect ratio; both 0: not "
                "resized.",
            )
            for name, other in (("width", "height"), ("height", "width"))
        ),
        io.Int.Input(
            "max_frames",
            default=0,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="Maximum number of frames to encode, from the start of the video, cut to 4 n "
            "+ 1: 81 frames give 21 latent frames. 0: all.",
        ),
    ]
