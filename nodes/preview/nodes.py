"""The node that shows a latent: quickly, without its VAE."""

from collections.abc import Iterator

import numpy
import torch
import torch.nn.functional as F
from comfy.model_management import throw_exception_if_processing_interrupted
from torch import Tensor

from ..host.api import io, ui
from ..host.error_text import about
from ..host.input_checks import checked
from ..host.latents import first_of
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, fps_input
from . import formats, tiny_decoder

timing = Later("nodes.host.timing")

_COLORS = "latent2rgb"

# Most pixels of a side of an animation, and of images that are resized latents.
_SIDE = 512

# Most pictures of an animation, which is encoded as a whole: they take at most 240 MiB.
_MOST_PICTURES = 320

# 81 frames of 512 x 296 take 0.6 s with the fastest method of WebP, and 4 s with the default one.
_FAST = {"method": 0, "quality": 80}

# WebP counts milliseconds in 32 bits with a sign.
_LONGEST_MS = 2**31 - 1

_TEXTS = {
    "samples": "Latent of a video or of images to show.",
    "decoder": "auto: the tiny decoder in models/vae_approx for this latent, if there is one, "
    "otherwise latent2rgb (for images of SD3 or Flux too). latent2rgb: one small picture per "
    "latent frame (of Wan, 4 video frames). Or a file from models/vae_approx.",
    "fps": "Frames per second of the video: 16 for Wan 2.1 and Wan 2.2 14B, 24 for Wan 2.2 5B.",
    "output": "Pictures per second: as above, with latent2rgb of Wan a quarter, so that the clip "
    "lasts as long.",
}


class PreviewLatent(io.ComfyNode):
    """Show the clip of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        decoders = [AUTO, _COLORS, *tiny_decoder.tiny_files()]
        return io.Schema(
            node_id="FastVAE_PreviewLatent",
            display_name="Preview Video Latent (Fast)",
            category=CATEGORY,
            description="Shows the clip of a latent within seconds, without its VAE: with a tiny "
            "decoder from models/vae_approx (taew2_1, lighttaew2_1, taew2_2, lighttaew2_2), or "
            "with ComfyUI's latent to RGB factors. The quality is that of a preview.",
            search_aliases=["preview latent", "taehv", "tiny vae", "latent2rgb", "quick decode"],
            is_output_node=True,
            inputs=[
                io.Latent.Input("samples", tooltip=_TEXTS["samples"]),
                io.Combo.Input(
                    "decoder", options=decoders, default=AUTO, tooltip=_TEXTS["decoder"]
                ),
                fps_input(_TEXTS["fps"]),
            ],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The pictures of the clip."),
                io.Float.Output(display_name="fps", tooltip=_TEXTS["output"]),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls, samples: dict[str, Tensor], decoder: str = AUTO, fps: float = 16.0
    ) -> io.NodeOutput:
        """Make the pictures, and a file that shows them."""
        latent = first_of(samples["samples"])
        if latent.ndim not in (4, 5):
            got = f"samples: got {latent.ndim} dimensions"
            raise ValueError(f"{got}; expected those of a video or of images")
        name = decoder
        if decoder == AUTO:
            # With four dimensions, 16 channels are mostly those of SD3 or Flux.
            channels = latent.shape[1] if latent.ndim == 5 else 0
            name = tiny_decoder.tiny_file(channels) or _COLORS
        if name == _COLORS:
            with about("samples"), timing.span("VAE decode", _COLORS):
                images, frames = _color(latent)
            fps = fps / frames
        else:
            videos = latent if latent.ndim == 5 else latent.unsqueeze(2)
            with about("decoder"):
                model = tiny_decoder.tiny_model(name, videos.shape[1])
            images = tiny_decoder.decode(model, videos)
        with timing.span("file", "animated preview"):
            shown = _animation(images, fps)
        return io.NodeOutput(images, fps, ui=shown)


def _color(latent: Tensor) -> tuple[Tensor, int]:
    """Return pictures `[T, H, W, 3]` by factors, and the video frames for each of them."""
    found = formats.format_of(latent)
    longest = max(latent.shape[-2:])
    scale = min(found.spacial_downscale_ratio, _SIDE // longest or _SIDE / longest)
    size = [max(1, round(scale * length)) for length in latent.shape[-2:]]
    videos = latent if latent.ndim == 5 else latent.unsqueeze(2)
    frames = videos.movedim(2, 1).flatten(0, 1)  # [N, C, h, w]
    frames = frames.unsqueeze(2) if found.latent_dimensions == 3 else frames

    def pictures() -> Iterator[Tensor]:
        for frame in frames.split(1):
            (picture,) = formats.colors(found, found.process_in(frame.float()))
            unit = torch.from_numpy(numpy.array(picture)).movedim(-1, 0)[None] / 255
            yield F.interpolate(unit, size, mode="bilinear", antialias=scale < 1)

    images = tiny_decoder.image((len(frames), *size, 3), pictures())
    return images, found.temporal_downscale_ratio if videos.shape[2] > 1 else 1


def _animation(images: Tensor, fps: float) -> ui.SavedImages:
    """Write images `[T, H, W, 3]` to an animated WebP for the node; long clips lose frames."""
    step = -(-len(images) // _MOST_PICTURES)
    shown = [_small(image) for image in images[::step]]
    fps = max(fps / step, 1000 * len(shown) / _LONGEST_MS)
    file = ui.ImageSaveHelper.save_animated_webp(
        shown, "fast_vae_preview", io.FolderType.temp, None, fps, lossless=False, **_FAST
    )
    return ui.SavedImages([file], is_animated=len(shown) > 1)


def _small(image: Tensor) -> Tensor:
    """Return an image `[H, W, 3]` with at most `_SIDE` pixels in height and in width."""
    throw_exception_if_processing_interrupted()
    scale = _SIDE / max(image.shape[:2])
    size = [max(1, round(scale * side)) for side in image.shape[:2]]
    if scale >= 1:
        return image
    x = image.movedim(-1, 0)[None]
    return F.interpolate(x, size, mode="bilinear", antialias=True)[0].movedim(0, -1)
