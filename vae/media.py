"""Video files in and out through PyAV, frame by frame, so that memory does not grow with length.

Writing is H.264 in mp4, tagged BT.709 and converted with its matrix. A picture is rounded as
ComfyUI's saver rounds it: the byte is `255 * x` without its fraction.

Whatever is written appears under its final name only when it is whole (`whole_file`).
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import torch
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream
from torch import Tensor

from ..kernels import frames_to_images
from .demux import BT709, announced_seconds, decoded, opened, quarter_turns, reason, upright_rgb
from .files import whole_file

# x264's default is 23; at 16 its error (about 48 dB on photographs) stays far below a VAE's.
CRF = 16
# Where a file gives neither a frame rate nor a duration.
FALLBACK_FPS = Fraction(25)


@dataclass(frozen=True)
class VideoFile:
    """A video file that can be read any number of times, each time from its first frame.

    Attributes:
        path: Where the file lies.
        height: Height of the picture in pixels, upright.
        width: Width of the picture in pixels, upright.
        fps: Frames per second, the average where the rate varies.
        estimated_frames: The count of frames that the file announces; None where it does not.
    """

    path: Path
    height: int
    width: int
    fps: Fraction
    estimated_frames: int | None

    def frames(self) -> Iterator[Tensor]:
        """Decode the file.

        Yields:
            Frames, `[H, W, 3]` uint8 RGB, upright.

        Raises:
            ValueError: The file is broken or ends too early.
        """
        with opened(self.path) as (container, stream):
            for frame in decoded(self.path, container, stream):
                yield upright_rgb(frame, self.height, self.width)

    def pieces(self, *, multiple: int = 1, frames: int = 4) -> Iterator[Tensor]:
        """Decode the file in runs of frames, such as `VideoVAE.encode_stream` takes.

        Args:
            multiple: Height and width are cropped about the centre to multiples of this.
            frames: Frames in a piece; the last may have fewer.

        Yields:
            Pieces, `[1, 3, t, H, W]` uint8.

        Raises:
            ValueError: The picture is smaller than `multiple`, or the file is broken.
        """
        height, width = self.cropped_size(multiple)
        top, left = (self.height - height) // 2, (self.width - width) // 2
        held: list[Tensor] = []
        for frame in self.frames():
            held.append(frame[top : top + height, left : left + width])
            if len(held) == frames:
                yield torch.stack(held).permute(3, 0, 1, 2).unsqueeze(0)
                held = []
        if held:
            yield torch.stack(held).permute(3, 0, 1, 2).unsqueeze(0)

    def cropped_size(self, multiple: int) -> tuple[int, int]:
        """Height and width, each cut down to a multiple of `multiple`."""
        height, width = (size - size % multiple for size in (self.height, self.width))
        if not height or not width:
            raise ValueError(
                f"{self.path} is {self.width}x{self.height}; "
                f"expected at least {multiple}x{multiple}"
            )
        return height, width


def read_video(path: str | os.PathLike[str]) -> VideoFile:
    """Look at a video file; its first frame is decoded and the rest is not.

    Args:
        path: A video in any format that FFmpeg reads. A picture is a video of one frame.

    Returns:
        The video, to be read with `frames` or `pieces`.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is no video: empty, broken, truncated, or without pictures.
    """
    path = Path(path)
    with opened(path) as (container, stream):
        # Rotation lies on the frame, not on the stream, and headers may be wrong about the size.
        first = next(decoded(path, container, stream), None)
        if first is None:
            raise ValueError(f"{path} holds no frame that can be decoded; expected a video")
        height, width = first.height, first.width
        if quarter_turns(first) % 2:
            height, width = width, height
        fps = Fraction(stream.average_rate or stream.guessed_rate or FALLBACK_FPS)
        count = stream.frames
        if not count:
            seconds = announced_seconds(stream) or (container.duration or 0) / av.time_base
            # Where the stream itself has no duration, time counts from the start of the file.
            late = 0.0 if stream.duration else first.time or 0.0
            count = max(0, round((seconds - late) * fps)) or None
    return VideoFile(path, height, width, fps, count)


class VideoWriter:
    """Writes frames to an H.264 mp4, which appears under its name only when it is whole.

    As a context manager: the path is tried when it is entered, before any work is done. If the
    body raises, nothing is left behind and a file that was there before stays as it was.
    """

    def __init__(
        self, path: str | os.PathLike[str], fps: Fraction | float, *, crf: float = CRF
    ) -> None:
        """Prepare to write; nothing is touched yet.

        Args:
            path: The mp4 to write.
            fps: Frames per second.
            crf: x264's constant rate factor, 0 to 51; less is better and bigger.

        Raises:
            ValueError: `fps` is not positive, or `path` is not named as an mp4.
        """
        self.path = Path(path)
        # What mp4 can hold: numerator and denominator are 32-bit.
        self.fps = Fraction(fps).limit_denominator(100_000) if 0 < fps < 10_000 else Fraction(0)
        if not self.fps:
            raise ValueError(f"fps is {fps}; expected more than 0 and less than 10000")
        if self.path.suffix.lower() not in (".mp4", ".m4v", ".mov"):
            raise ValueError(f"{self.path} is not named as a video; expected a name such as x.mp4")
        self.crf = crf
        self.frames = 0
        self._stack = ExitStack()
        self._part = self.path
        self._output: tuple[OutputContainer, VideoStream] | None = None

    def __enter__(self) -> "VideoWriter":
        with ExitStack() as stack:
            self._part = stack.enter_context(whole_file(self.path))
            stack.push(self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, frames: Tensor) -> None:
        """Append frames.

        Args:
            frames: `[T, H, W, 3]` uint8 RGB; the first call settles H and W, both even.

        Raises:
            ValueError: Another shape or dtype.
            OSError: The disk is full, or it failed.
        """
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8:
            raise ValueError(
                f"frames are {list(frames.shape)} {frames.dtype}; expected [T, H, W, 3] uint8"
            )
        height, width = frames.shape[1:3]
        with _errors_name(self.path):
            if self._output is None:
                self._output = self._opened(height, width)
            container, stream = self._output
            if (height, width) != (stream.height, stream.width):
                raise ValueError(
                    f"frames are {width}x{height}; this video is {stream.width}x{stream.height}"
                )
            for picture in frames.cpu().contiguous().numpy():
                rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame = rgb.reformat(
                    format="yuv420p", dst_colorspace=BT709, dst_color_range=ColorRange.MPEG
                )
                frame.pts = self.frames
                frame.time_base = 1 / self.fps
                container.mux(stream.encode(frame))
                self.frames += 1

    def _opened(self, height: int, width: int) -> tuple[OutputContainer, VideoStream]:
        if height % 2 or width % 2:
            raise ValueError(f"frames are {width}x{height}; H.264 needs even width and height")
        # faststart: the index goes to the front, so that a browser plays what it has not yet read.
        container = av.open(
            f"file:{self._part}", "w", format="mp4", options={"movflags": "faststart"}
        )
        stream = container.add_stream("h264", rate=self.fps, options={"crf": str(self.crf)})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = ColorRange.MPEG
        return container, stream

    def _close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file, or give it up; runs before `whole_file` names or removes it."""
        if kind is not None:
            if self._output is not None:
                with suppress(FFmpegError):
                    # The first error is on its way; this one says the same of the same disk.
                    self._output[0].close()
            return
        if self._output is None:
            raise ValueError(f"no frames were written to {self.path}; expected at least one")
        container, stream = self._output
        with _errors_name(self.path), container:
            container.mux(stream.encode(None))


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
