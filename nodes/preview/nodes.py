"""The node that shows a latent: quickly, without its VAE."""

import torch.nn.functional as F
from torch import Tensor

from ..host.api import io
from ..host.error_text import about
from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.progress import Progress
from ..host.widgets import AUTO, CATEGORY, fps_input
from .tiny_files import tiny_file, tiny_files

clip_file, decoders = Later("nodes.preview.clip_file"), Later("nodes.preview.decoders")
formats = Later("nodes.preview.formats")
timing = Later("nodes.host.timing")

_COLORS = "latent2rgb"

# Most pixels of a side of images that are resized latents.
_SIDE = 512


class PreviewLatent(io.ComfyNode):
    """Show the clip of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
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
                io.Latent.Input("samples", tooltip="Latent of a video or of images to show."),
                io.Combo.Input(
                    "decoder",
                    options=[AUTO, _COLORS, *tiny_files()],
                    default=AUTO,
                    tooltip="auto: the tiny decoder in models/vae_approx for this latent, if there "
                    "is one, otherwise latent2rgb (for images of SD3 or Flux too). latent2rgb: one "
                    "small picture per latent frame (of Wan, 4 video frames). Or a file from "
                    "models/vae_approx.",
                ),
                fps_input(
                    "Frames per second of the video: 16 for Wan 2.1 and Wan 2.2 14B, 24 for Wan "
                    "2.2 5B."
                ),
            ],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The pictures of the clip."),
                io.Float.Output(
                    display_name="fps",
                    tooltip="Pictures per second: as above, with latent2rgb of Wan a quarter, so "
                    "that the clip lasts as long.",
                ),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls, samples: dict[str, Tensor], decoder: str = AUTO, fps: float = 16.0
    ) -> io.NodeOutput:
        """Make the pictures, and a file that shows them."""
        latent = samples["samples"]
        if latent.is_nested:
            latent = latent.unbind()[0]
        if latent.ndim not in (4, 5):
            raise ValueError(
                f"samples: got {latent.ndim} dimensions; expected those of a video or of images"
            )
        name = decoder
        if decoder == AUTO:
            # With four dimensions, 16 channels are mostly those of SD3 or Flux.
            name = (tiny_file(latent.shape[1]) if latent.ndim == 5 else None) or _COLORS
        if name == _COLORS:
            with about("samples"), timing.span("VAE decode", _COLORS):
                images, frames = _color(latent)
            fps = fps / frames
        else:
            videos = latent if latent.ndim == 5 else latent.unsqueeze(2)
            with about("decoder"):
                decoders.tiny_model(name, videos.shape[1])
            with about("samples"):
                images = decoders.decode(name, videos)
        with timing.span("file", "animated preview"):
            saved = clip_file.save_animation(images, fps)
        return io.NodeOutput(images, fps, ui=saved)


def _color(latent: Tensor) -> tuple[Tensor, int]:
    """Return pictures `[T, H, W, 3]` by factors, and the video frames for each of them."""
    found = formats.format_of(latent)
    videos = latent if latent.ndim == 5 else latent.unsqueeze(2)
    longest = max(videos.shape[-2:])
    scale = min(found.spacial_downscale_ratio, _SIDE // longest or _SIDE / longest)
    height, width = (max(1, round(scale * length)) for length in videos.shape[-2:])
    count = videos.shape[0] * videos.shape[2]
    images = decoders.empty_images(count, height, width, 3)
    progress, at = Progress(count), 0
    for video in videos:
        inner = video[None] if found.latent_dimensions == 3 else video.movedim(1, 0)
        x = found.process_in(inner.float())
        x = x[0] if found.latent_dimensions == 3 else x.movedim(0, 1)
        for picture in formats.color(found, x).to(images.device):
            unit = picture.movedim(-1, 0)[None].float() / 255
            resized = F.interpolate(unit, (height, width), mode="bilinear", antialias=scale < 1)
            images[at] = resized[0].movedim(0, -1).clamp_(0, 1)
            progress.passed(1, images[at : at + 1])
            at += 1
    return images, found.temporal_downscale_ratio if videos.shape[2] > 1 else 1
