"""The nodes between video files and latents, which hold a few frames at a time."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
import torch
from torch import Tensor

from ... import vae as library
from ...vae import media
from ..host.api import Input, InputImpl, io, ui
from ..host.error_text import described
from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.progress import Progress
from ..host.widgets import AUTO, CATEGORY, DTYPES, log_unused, once, timing_output
from .file_prefix import check_prefix
from .inputs import chosen, depth_inputs, file_inputs, video_inputs
from .target import VideoTarget, frame_range, workflow_tags

if TYPE_CHECKING:
    from ...vae import StreamOptions
    from ..vae.comfy_vae import FastVAE
    from .source import Fit, Source

comfy_vae, stream = Later("nodes.vae.comfy_vae"), Later("nodes.video.stream")
other_vae, timing = Later("nodes.vae.other_vae"), Later("nodes.host.timing")
sources, sequences = Later("nodes.video.source"), Later("nodes.video.sequence")

# Most characters of a range of frames; Python does not parse numbers of thousands of digits.
_LONGEST_RANGE = 60

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
            inputs=[
                io.Latent.Input("samples", tooltip="Latent of one video to decode."),
                io.Vae.Input(
                    "vae",
                    tooltip="VAE to use. A VAE that is not fast decodes the whole video before "
                    "writing starts and needs the memory for it.",
                ),
                *file_inputs(),
                io.Audio.Input(
                    "audio",
                    optional=True,
                    tooltip="Audio for the file; the part beyond the end of the video is cut "
                    "off. ffv1 and prores store it lossless.",
                ),
                io.Boolean.Input(
                    "hardware",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Encode h264, hevc or av1 on the GPU: less work for the CPU, larger "
                    "files at the same quality. Without a usable GPU encoder the CPU encodes, "
                    "and the log says so.",
                ),
                io.String.Input(
                    "frames",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="Range of frames to write, such as 40-80: counted from 0, both ends "
                    "included. 40-: to the end. Empty: all. Frames are identical to those of the "
                    "whole video; unneeded parts are not decoded.",
                ),
                *once(),
                *depth_inputs(),
            ],
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
        target = VideoTarget(
            _rate(fps),
            codec,
            quality,
            hardware,
            filename_prefix,
            save_to,
            None if bit_depth == AUTO else int(bit_depth),
            chosen(dither),
            chosen(alpha),
        )
        if len(frames) > _LONGEST_RANGE:
            raise ValueError(f"frames is {described(frames)}; expected two numbers, such as 40-80")
        check_prefix(filename_prefix, Path(folder_paths.get_directory_by_type(save_to)))
        latent = comfy_vae.one_video(vae, samples["samples"])
        options = library.StreamOptions(chunk or None, DTYPES.get(dtype))
        device = vae.device if isinstance(vae, comfy_vae.FastVAE) else None
        if device is None:
            log_unused(dtype=dtype != AUTO, chunk=chunk != 0)
            target.sound(audio, range(0))  # its errors come before the work is done
        pieces, wanted, size = _decoded(vae, latent, target, frames, options)
        sound = target.sound(audio, wanted)
        with timing.span("file", device=device):
            path, result = target.write(pieces, *size, sound, workflow_tags(cls.hidden))
        if path.is_dir():
            video = sequences.ImageSequence(path, target.fps)
            shown = ui.SavedImages([result]) if codec == "png" else ui.PreviewText(str(path))
        else:
            video, shown = InputImpl.VideoFromFile(str(path)), ui.PreviewVideo([result])
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
            inputs=[
                io.Video.Input(
                    "video",
                    tooltip="Video from Load Video or Trim Video, for example. Its full depth is "
                    "read (8, 10, 12 or 16 bits), with the file's rotation and pixel aspect ratio "
                    "applied. Height and width are center-cropped to multiples of 8 (Wan 2.2 5B, "
                    "Qwen-Image 2.1: 16; the model of the 5B needs 32), the length to 4 n + 1 "
                    "frames.",
                ),
                io.Vae.Input(
                    "vae",
                    tooltip="VAE to use. A VAE that is not fast encodes the whole video at once "
                    "and needs the memory for it.",
                ),
                *video_inputs(),
                *once(),
            ],
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
        try:
            source = sources.source_of(video)
            fit = sources.Fit(
                fps=_rate(fps) if fps else None,
                size=sources.shape_of(source.size, width, height),
                multiple=vae.first_stage_model.config.spatial_compression if is_fast else 1,
                limit=max_frames or None,
            )
            if is_fast:
                latent, count = _encoded(vae, source, fit, options)
            else:
                log_unused(dtype=dtype != AUTO, chunk=chunk != 0)
                latent, count = _encoded_whole(vae, source, fit)
        except ValueError as error:
            raise ValueError(f"video: {error}") from None
        except FileNotFoundError as error:
            raise FileNotFoundError(f"video: {error}") from None
        except OSError as error:
            raise OSError(f"video: {error}") from error
        with timing.span("file"):
            sound = source.sound(fit)
        return io.NodeOutput({"samples": latent}, float(fit.fps or source.fps), count, sound)


def _rate(fps: float) -> Fraction:
    """Return frames per second as in files: 29.97003 becomes 30000 / 1001."""
    return Fraction(fps).limit_denominator(1001)


def _decoded(
    vae: Any,  # noqa: ANN401, of ComfyUI
    latent: Tensor,
    target: VideoTarget,
    frames: str,
    options: "StreamOptions",
) -> tuple[Iterator[Tensor], range, tuple[int, int]]:
    """Return pictures for `target`, the wanted frames, and the height and width."""
    if isinstance(vae, comfy_vae.FastVAE):
        shape = vae.first_stage_model.config.decoded_shape(latent.shape)
        _, channels, count, height, width = shape
        target.check(height, width, channels)
        wanted = frame_range(frames, count)
        made = stream.decode_pictures(
            vae, latent, options, wanted, dtype=target.dtype, alpha=target.keeps_alpha
        )
        return made, wanted, (height, width)
    frame_range(frames, None)
    height, width = (vae.spacial_compression_decode() * side for side in latent.shape[-2:])
    target.check(height, width)
    images = other_vae.decoded(vae, latent)
    if images.ndim not in (4, 5):
        raise ValueError(f"vae: its output is {list(images.shape)}; expected images [N, H, W, C]")
    images = images.reshape(-1, *images.shape[-3:])
    target.check(*images.shape[1:])
    images = images if target.keeps_alpha else images[..., :3]
    count, height, width, _ = images.shape
    wanted = frame_range(frames, count)
    return _pictures(images, wanted, target.dtype), wanted, (height, width)


def _pictures(images: Tensor, wanted: range, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield an IMAGE in a dtype of `VideoTarget`, a few frames at a time."""
    progress = Progress(len(wanted))
    for start in wanted[::_FRAMES]:
        part = images[start : min(start + _FRAMES, wanted.stop)]
        pictures = media.convert_pictures(part, dtype)
        progress.passed(len(pictures), pictures)
        yield pictures


def _encoded(
    vae: "FastVAE", source: "Source", fit: "Fit", options: "StreamOptions"
) -> tuple[Tensor, int]:
    """Return the latent, and the number of its frames."""
    config = vae.first_stage_model.config

    def pieces() -> Iterator[Tensor]:
        return (media.with_channels(each, config.image_channels) for each in source.pieces(fit))

    latent = stream.encode_video(vae, pieces, source.estimate(fit), options)
    return latent, config.frames(latent.shape[2]) if latent.ndim == 5 else len(latent)


def _encoded_whole(vae: Any, source: "Source", fit: "Fit") -> tuple[Tensor, int]:  # noqa: ANN401
    """Return the same with a VAE of another kind."""
    with timing.span("file"):
        images = torch.cat([sources.as_images(piece) for piece in source.pieces(fit)])
    latent = other_vae.encoded(vae, images, "video")
    ratio = vae.upscale_ratio
    if latent.ndim == 5 and isinstance(ratio, tuple):
        return latent, int(ratio[0](latent.shape[2]))
    return latent, len(images)
