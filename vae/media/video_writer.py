"""Writing of video files with PyAV, frame by frame, in memory that is independent of the length.

YUV formats use the BT.709 matrix in limited range and are tagged so; ffv1 keeps RGB. Values are
rounded as by ComfyUI's save nodes: `255 * x`, truncated.

A file appears under its final name only when it is complete (`whole_file`).
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy
import torch
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.reformatter import ColorRange, VideoReformatter
from av.video.stream import VideoStream
from torch import Tensor

from ...kernels import frames_to_images
from .atomic_file import whole_file
from .audio import Audio, SoundTrack
from .av_input import BT709, reason
from .codecs import check_size, codec_named, container_of, find_encoder, sound_encoder
from .encoder_options import options_of, pixel_format_of
from .timestamps import checked_rate

LOG = logging.getLogger(__name__)
# The only pixel format without chroma.
RGB = "bgr0"


class VideoWriter:
    """Writes frames to a video file, which appears under its final name only when it is complete.

    Use it as a context manager; entering it checks that the path is writable. If the body raises,
    nothing is left behind and an older file is kept.

    Attributes:
        frames: Number of frames written so far.
        encoder: FFmpeg's name of the encoder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fps: Fraction | float,
        *,
        codec: str = "h264",
        quality: int | None = None,
        hardware: bool = False,
        audio: Audio | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; no file is created yet.

        Args:
            path: The file to write; its suffix selects the container, one of `Codec.suffixes`.
            fps: Frames per second, kept as a fraction.
            codec: One of `CODECS`.
            quality: 0 to 100; higher is better and larger. None: 70, no visible loss on the output
                of a VAE. ffv1 is lossless and ignores it.
            hardware: Prefer a hardware encoder if one works.
            audio: The audio; it is cut to the length of the video.
            metadata: Tags of the container. Matroska and WebM write their names in capitals.

        Raises:
            ValueError: `fps` is not positive, the suffix does not fit the codec, `quality` is out
                of range, or this build of PyAV cannot encode the codec.
        """
        self.path = Path(path)
        self.fps = checked_rate(fps)
        self.codec = codec_named(codec)
        self._format = container_of(self.codec, self.path)
        self.encoder = find_encoder(self.codec, hardware)
        options_of(self.encoder, quality)
        self.quality = quality
        # Empty audio counts as none: some players stop at an empty track.
        self.audio = audio if audio and audio.waveform.shape[1] else None
        self._sound_encoder = sound_encoder(self.codec, self.path) if self.audio else ""
        self.metadata = dict(metadata or {})
        self.frames = 0
        self._stack = ExitStack()
        self._part = self.path
        self._output: tuple[OutputContainer, VideoStream] | None = None
        self._sound: SoundTrack | None = None
        self._reformatter = VideoReformatter()

    def __enter__(self) -> "VideoWriter":
        with ExitStack() as stack:
            self._part = stack.enter_context(whole_file(self.path))
            stack.push(self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401, as ExitStack takes them
        self._stack.__exit__(*error)

    def write(self, frames: Tensor) -> None:
        """Append frames.

        Args:
            frames: `[T, H, W, 3]` uint8 RGB; H and W are fixed by the first call, see `check_size`.

        Raises:
            ValueError: The shape or dtype is wrong, or the encoder failed.
            OSError: The disk is full or failed.
        """
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8:
            raise ValueError(
                f"frames are {list(frames.shape)} {frames.dtype}; expected [T, H, W, 3] uint8"
            )
        height, width = frames.shape[1:3]
        if self._output is None:
            check_size(self.codec.name, height, width)
        with _errors_name(self.path):
            if self._output is None:
                self._output = self._opened(height, width)
            container, stream = self._output
            if (height, width) != (stream.height, stream.width):
                raise ValueError(
                    f"frames are {width}x{height}; expected {stream.width}x{stream.height}"
                )
            for picture in frames.cpu().contiguous().numpy():
                container.mux(stream.encode(self._frame(picture)))
                self.frames += 1
                if self._sound:
                    self._sound.write_until(self.frames / self.fps)

    def _opened(self, height: int, width: int) -> tuple[OutputContainer, VideoStream]:
        """Open the encoder and the file with all of its streams."""
        try:
            return self._opened_with(self.encoder, height, width)
        except FFmpegError:
            # Hardware limits the size and the number of videos at a time.
            software = find_encoder(self.codec)
            if self.encoder == software:
                raise
            LOG.info("Fast Video VAE: %s failed at %dx%d; using software", self.encoder, width,
                     height)  # fmt: skip
            self.encoder = software
            return self._opened_with(software, height, width)

    def _opened_with(
        self, encoder: str, height: int, width: int
    ) -> tuple[OutputContainer, VideoStream]:
        if encoder == "libsvtav1":
            # SVT-AV1 logs its settings to stderr, controlled only by this variable; 1: errors only.
            os.environ.setdefault("SVT_LOG", "1")
        container = av.open(f"file:{self._part}", "w", format=self._format, options=self._flags())
        with ExitStack() as stack:
            stack.callback(container.close)
            options = options_of(encoder, self.quality)
            added = container.add_stream(encoder, rate=self.fps, options=options)
            stream = cast(VideoStream, added)
            stream.height, stream.width = height, width
            stream.pix_fmt = pixels = pixel_format_of(encoder)
            context = stream.codec_context
            if self.codec.name == "hevc" and self._format in ("mp4", "mov"):
                context.codec_tag = "hvc1"  # required by Apple's players
            if pixels != RGB:
                context.colorspace = context.color_primaries = context.color_trc = BT709
                context.color_range = ColorRange.MPEG
            context.open()
            if self.audio:
                self._sound = SoundTrack(self.audio, container, self._sound_encoder)
            container.metadata.update(self.metadata)
            stack.pop_all()
        return container, stream

    def _flags(self) -> dict[str, str]:
        if self._format not in ("mp4", "mov"):
            return {}
        # faststart moves the index to the front, so that a browser can play while it loads. Without
        # the other flag only tags that mp4 defines are kept.
        return {"movflags": "faststart+use_metadata_tags" if self.metadata else "faststart"}

    def _frame(self, picture: numpy.ndarray) -> av.VideoFrame:
        """Convert `[H, W, 3]` to a frame in the encoder's format with its time."""
        rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
        pixels = pixel_format_of(self.encoder)
        if pixels == RGB:
            frame = self._reformatter.reformat(rgb, format=pixels)
        else:
            frame = self._reformatter.reformat(
                rgb, format=pixels, dst_colorspace=BT709, dst_color_range=ColorRange.MPEG
            )
            # Some encoders use the tags of the frame. PyAV before 17 lacks them; players assume the
            # same.
            with suppress(AttributeError):
                frame.color_primaries = frame.color_trc = BT709
        frame.pts = self.frames
        frame.time_base = 1 / self.fps
        return frame

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish or discard the file; runs before `whole_file` renames or removes it."""
        if kind is not None:
            if self._output is not None:
                # Closing copies the whole file to move the index to the front, unless the name is
                # gone. Windows keeps the name of an open file.
                with suppress(OSError):
                    self._part.unlink()
                with suppress(FFmpegError):
                    # Another error is being raised; this one repeats it for the same disk.
                    self._output[0].close()
            return
        if self._output is None:
            raise ValueError(f"no frames were written to {self.path}; expected at least one")
        container, stream = self._output
        with _errors_name(self.path), container:
            container.mux(stream.encode(None))
            if self._sound:
                self._sound.close()


def frames_to_uint8(frames: Tensor) -> Tensor:
    """Convert decoded frames to pictures as ComfyUI's save nodes do: clamp, scale, truncate.

    Args:
        frames: `[1, C, T, H, W]` in about [-1, 1], any float dtype; C is 3, or 4 with an alpha
            channel, which is dropped because mp4 has none.

    Returns:
        `[T, H, W, 3]` uint8 on the device of `frames`.

    Raises:
        ValueError: The batch size is not 1, or C is not 3 or 4.
    """
    if frames.ndim != 5 or frames.shape[0] != 1 or frames.shape[1] not in (3, 4):
        raise ValueError(f"frames are {list(frames.shape)}; expected [1, 3 or 4, T, H, W]")
    return frames_to_images(frames[:, :3], dtype=torch.uint8)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Give FFmpeg's errors the final path and the message of the operating system, if any."""
    try:
        yield
    except FFmpegError as error:
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ValueError(f"{path} cannot be encoded ({reason(error)})") from error
