"""The nodes between video files and latents, which hold a few frames at a time."""

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import vae as library
from ...vae import media
from ..host.api import Input, io, ui
from ..host.frame_range import frame_range
from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.progress import Progress
from ..host.widgets import AUTO, CATEGORY, DTYPES, log_unused, timing_output
from .inputs import DEPTHS, SWITCHES, decode_inputs, encode_inputs
from .target import VideoTarget, workflow_tags

if TYPE_CHECKING:
    from comfy.sd import VAE

    from ...vae import StreamOptions
    from .source import Fit, Source

comfy_vae, stream = Later("nodes.vae.comfy_vae"), Later("nodes.video.stream")
timing = Later("nodes.host.timing")
sources, videos = Later("nodes.video.source"), Later("nodes.video.videos")

# Frames of an IMAGE that are converted at a time.
_FRAMES = 4


class DecodeVideo(io.ComfyNode):
    """Decode a latent to a video file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_DecodeVideo",
            display_name="VAE Decode to Video (Fast)",
            category=CATEGORY,
            description="Decodes a latent directly to a video file, a few frames at a time. With "
            "a fast VAE, memory other than the latent does not grow with the length of the "
            "video: no IMAGE is created, which takes 11 MB per frame of 1280 x 720.",
            search_aliases=["save video", "latent to video", "decode video", "export video"],
            inputs=decode_inputs(),
            outputs=[
                io.Video.Output(
                    display_name="VIDEO",
                    tooltip="The written file, as an input for other video nodes.",
                ),
                timing_output(),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    @checked
    def execute(
        cls,
        samples: dict[str, Tensor],
        vae: object,
        fps: float,
        codec: str,
        quality: int,
        filename_prefix: str,
        save_to: str,
        audio: dict[str, Any] | None = None,
        hardware: bool = False,
        frames: str = "",
        dtype: str = AUTO,
        chunk: int = 0,
        bit_depth: str = AUTO,
        dither: str = AUTO,
        alpha: str = AUTO,
    ) -> io.NodeOutput:
        """Decode and write at the same time."""
        writer = {"quality": quality, "hardware": hardware, "bit_depth": DEPTHS[bit_depth]}
        writer |= {"dither": SWITCHES[dither], "alpha": SWITCHES[alpha]}
        target = VideoTarget(_rate(fps), codec, filename_prefix, save_to, writer)
        # Errors come before the work is done.
        frame_range(frames, None)
        latent = comfy_vae.one_video(vae, samples["samples"])
        target.sound(audio, range(0))
        options = library.StreamOptions(chunk or None, DTYPES.get(dtype))
        pieces, wanted, size = _decoded(vae, latent, target, frames, options)
        sound = target.sound(audio, wanted)
        device = vae.device if isinstance(vae, comfy_vae.FastVAE) else None
        with timing.span("file", device=device):
            path, result = target.write(pieces, size, sound, workflow_tags(cls.hidden))
        if path.is_dir():
            video = videos.ImageSequence(path.iterdir(), target.fps)
            shown = ui.SavedImages([result]) if codec == "png" else ui.PreviewText(str(path))
        else:
            video, shown = videos.FileVideo(str(path)), ui.PreviewVideo([result])
        return io.NodeOutput(video, timing.text(), ui=shown)


class EncodeVideo(io.ComfyNode):
    """Encode a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_EncodeVideo",
            display_name="VAE Encode Video (Fast)",
            category=CATEGORY,
            description="Encodes a video directly from its file, a few frames at a time. With a "
            "fast VAE, memory other than the latent does not grow with the length of the video: "
            "no IMAGE is created, which takes 11 MB per frame of 1280 x 720.",
            search_aliases=["video to latent", "load video", "encode video"],
            inputs=encode_inputs(),
            outputs=[
                io.Latent.Output(display_name="LATENT"),
                io.Float.Output(
                    display_name="fps", tooltip="Frames per second of the encoded video."
                ),
                io.Int.Output(
                    display_name="frames", tooltip="Number of video frames in the latent."
                ),
                io.Audio.Output(display_name="audio", tooltip="Audio of the video, if it has any."),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls,
        video: Input.Video,
        vae: object,
        fps: float = 0.0,
        width: int = 0,
        height: int = 0,
        max_frames: int = 0,
        dtype: str = AUTO,
        chunk: int = 0,
    ) -> io.NodeOutput:
        """Read and encode at the same time."""
        options = library.StreamOptions(chunk or None, DTYPES.get(dtype))
        is_fast = isinstance(vae, comfy_vae.FastVAE)
        if is_fast and vae.first_stage_model.encoder is None:
            raise ValueError("vae: the checkpoint has no encoder; only decoding works with it")
        with sources.about_video():
            source = videos.source_of(video)
            fit = sources.Fit(
                fps=_rate(fps) if fps else None,
                size=sources.shape_of(source.size, width, height),
                multiple=vae.first_stage_model.config.spatial_compression if is_fast else 1,
                limit=max_frames or None,
            )
            latent, count = _encoded(vae, source, fit, options)
        with timing.span("file"):
            sound = source.sound(fit)
        return io.NodeOutput({"samples": latent}, float(fit.fps or source.fps), count, sound)


def _rate(fps: float) -> Fraction:
    """Return frames per second as in files: 29.97003 becomes 30000 / 1001."""
    return Fraction(fps).limit_denominator(1001)


def _decoded(
    vae: "VAE", latent: Tensor, target: VideoTarget, frames: str, options: "StreamOptions"
) -> tuple[Iterator[Tensor], range, tuple[int, int]]:
    """Return pictures for `target`, the wanted frames, and the height and width."""
    dtype, alpha = target.form.dtype, target.form.keeps_alpha
    if isinstance(vae, comfy_vae.FastVAE):
        shape = vae.first_stage_model.config.decoded_shape(latent.shape)
        _, channels, count, height, width = shape
        target.check(height, width, channels)
        wanted = frame_range(frames, count)
        made = stream.decode_pictures(vae, latent, options, wanted, dtype=dtype, alpha=alpha)
        return made, wanted, (height, width)
    log_unused(dtype=options.dtype is not None, chunk=options.chunk is not None)
    target.check(*(vae.spacial_compression_decode() * side for side in latent.shape[-2:]))
    images = comfy_vae.by_another(vae, "decode", latent, "samples")
    if images.ndim not in (4, 5):
        raise ValueError(f"vae: its output is {list(images.shape)}; expected images [N, H, W, C]")
    images = images.reshape(-1, *images.shape[-3:])
    target.check(*images.shape[1:])
    wanted = frame_range(frames, len(images))
    images = images[wanted.start : wanted.stop, ..., : 4 if alpha else 3]
    return _pictures(images, dtype), wanted, images.shape[1:3]


def _pictures(images: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield an IMAGE in a dtype of `VideoWriter`, a few frames at a time."""
    progress = Progress(len(images))
    for part in images.split(_FRAMES):
        pictures = media.convert_pictures(part, dtype)
        progress.passed(len(pictures), pictures)
        yield pictures


def _encoded(
    vae: "VAE", source: "Source", fit: "Fit", options: "StreamOptions"
) -> tuple[Tensor, int]:
    """Return the latent, and the number of its frames."""
    if isinstance(vae, comfy_vae.FastVAE):
        config = vae.first_stage_model.config

        def pieces() -> Iterator[Tensor]:
            return (media.with_channels(one, config.image_channels) for one in source.pieces(fit))

        latent = stream.encode_video(vae, pieces, source.estimate(fit), options)
        return latent, config.frames(latent.shape[2]) if latent.ndim == 5 else len(latent)
    log_unused(dtype=options.dtype is not None, chunk=options.chunk is not None)
    with timing.span("file"):
        images = torch.stack([*sources.Images(source, fit)])
    latent = comfy_vae.by_another(vae, "encode", images, "video")
    ratio = vae.upscale_ratio
    is_video = latent.ndim == 5 and isinstance(ratio, tuple)
    return latent, int(ratio[0](latent.shape[2])) if is_video else len(images)
