"""Video files out through PyAV, frame by frame, so that memory does not grow with length.

What has chroma is converted with the matrix of BT.709, in the limited range, and tagged so; ffv1
keeps RGB. A picture is rounded as ComfyUI's saver rounds it: the byte is `255 * x` without its
fraction.

Whatever is written appears under its final name only when it is whole (`whole_file`).
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
# The one format of pixels without chroma.
RGB = "bgr0"


class VideoWriter:
    """Writes frames to a video file, which appears under its name only when it is whole.

    As a context manager: the path is tried when it is entered, before any work is done. If the
    body raises, nothing is left behind and a file that was there before stays as it was.

    Attributes:
        frames: Frames that were written so far.
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
        """Prepare to write; nothing is touched yet.

        Args:
            path: The file to write; its suffix names the container: `Codec.suffixes`.
            fps: Frames per second, kept as a fraction.
            codec: One of `CODECS`.
            quality: 0 to 100; more is better and bigger. None: 70, which shows no loss on what a
                VAE made. ffv1 is without loss and does not mind it.
            hardware: Prefer an encoder in hardware, where one works.
            audio: The sound; it ends with the video.
            metadata: Tags of the container. Matroska and WebM spell their names in capitals.

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
        # An empty sound is none: some players stop at an empty track.
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
            frames: `[T, H, W, 3]` uint8 RGB; the first call settles H and W, see `check_size`.

        Raises:
            ValueError: Another shape or dtype, or the encoder failed.
            OSError: The disk is full, or it failed.
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
                    f"frames are {width}x{height}; this video is {stream.width}x{stream.height}"
                )
            for picture in frames.cpu().contiguous().numpy():
                container.mux(stream.encode(self._frame(picture)))
                self.frames += 1
                if self._sound:
                    self._sound.write_until(self.frames / self.fps)

    def _opened(self, height: int, width: int) -> tuple[OutputContainer, VideoStream]:
        """Open the encoder and the file, with every stream that it will have."""
        try:
            return self._opened_with(self.encoder, height, width)
        except FFmpegError:
            # Chips have limits of their own, on the size or on how many videos at a time.
            software = find_encoder(self.codec)
            if self.encoder == software:
                raise
            LOG.info("Fast Video VAE: %s refused %dx%d; software takes over", self.encoder, width,
                     height)  # fmt: skip
            self.encoder = software
            return self._opened_with(software, height, width)

    def _opened_with(
        self, encoder: str, height: int, width: int
    ) -> tuple[OutputContainer, VideoStream]:
        if encoder == "libsvtav1":
            # It writes its settings to stderr, and listens to nothing else: 1 is errors alone.
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
                context.codec_tag = "hvc1"  # Apple's players take no other
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
        # faststart: the index goes to the front, so that a browser plays what it has not yet read.
        # Without the other only the names that mp4 itself knows are kept.
        return {"movflags": "faststart+use_metadata_tags" if self.metadata else "faststart"}

    def _frame(self, picture: numpy.ndarray) -> av.VideoFrame:
        """Convert `[H, W, 3]` to what the encoder takes, with its place in time."""
        rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
        pixels = pixel_format_of(self.encoder)
        if pixels == RGB:
            frame = self._reformatter.reformat(rgb, format=pixels)
        else:
            frame = self._reformatter.reformat(
                rgb, format=pixels, dst_colorspace=BT709, dst_color_range=ColorRange.MPEG
            )
            # Some encoders go by the frame. PyAV before 17 does not tell it; players guess as much.
            with suppress(AttributeError):
                frame.color_primaries = frame.color_trc = BT709
        frame.pts = self.frames
        frame.time_base = 1 / self.fps
        return frame

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the file, or give it up; runs before `whole_file` names or removes it."""
        if kind is not None:
            if self._output is not None:
                # Closing moves the index to the front, which copies all that was written; it cannot
                # where the name is gone. Windows keeps the name of a file that is open.
                with suppress(OSError):
                    self._part.unlink()
                with suppress(FFmpegError):
                    # The first error is on its way; this one says the same of the same disk.
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
    """Turn decoded frames into pictures as ComfyUI's saver does: clamp, scale, drop the fraction.

    Args:
        frames: `[1, C, T, H, W]` in about [-1, 1], any float dtype; C is 3, or 4 with an alpha
            channel, which is dropped because mp4 has none.

    Returns:
        `[T, H, W, 3]` uint8 on the device of `frames`.

    Raises:
        ValueError: More than one video, or another count of channels.
    """
    if frames.ndim != 5 or frames.shape[0] != 1 or frames.shape[1] not in (3, 4):
        raise ValueError(f"frames are {list(frames.shape)}; expected [1, 3 or 4, T, H, W]")
    return frames_to_images(frames[:, :3], dtype=torch.uint8)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Give FFmpeg's errors the final path and, where there is one, the system's own words."""
    try:
        yield
    except FFmpegError as error:
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ValueError(f"{path} cannot be encoded ({reason(error)})") from error
