"""Writing of video files with PyAV, frame by frame, in memory that is independent of the length.

`pictures.py` has colors and depth.

A file or a folder of images appears under its final name only when it is complete (`whole_file`).
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import torch
from av.container import OutputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.stream import VideoStream
from torch import Tensor

from ...kernels import frames_to_images
from .atomic_file import Draft, whole_file, whole_folder
from .audio import Audio, SoundTrack
from .av_input import reason
from .codecs import check_size, codec_named, container_of, find_encoding, sound_encoder
from .encoder_process import Settings, add_stream
from .image_folder import ImageFolder
from .pictures import WHITE, FrameMaker, picture_dtype
from .segments import SegmentEncoder
from .timestamps import checked_rate

LOG = logging.getLogger(__name__)
# Frames that a ProRes encoder holds; other encoders have threads of their own.
PRORES_THREADS = 2
# Videos of up to this many frames end within the delay of x265's B-frames, where it leaves the
# times of decoding to chance (x265 4.1 and 4.2).
X265_DELAY = 2


class VideoWriter:
    """Writes frames to a video file, which appears under its final name only when it is complete.

    Use it as a context manager; entering it checks that the path is writable and free. If the body
    raises, nothing is left behind. A file that appears at `path` meanwhile is kept: this one gets
    the next free of `others`, by default `x_2.mp4` and so on. `path` is its name afterwards.

    With a codec of images, `x.png` or `x.exr` stands for a new folder `x` with an image per frame,
    such as `x/frame_00000.png`; `path` is that folder then.
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
        bit_depth: int | None = None,
        dither: bool | None = None,
        alpha: bool | None = None,
        overwrite: bool = False,
        others: Iterator[Path] | None = None,
    ) -> None:
        """Check what can be checked; no file is created yet.

        None: `quality` 70; `bit_depth` 8 for uint8, else the codec's; `dither` if the codec is
        lossy; `alpha` if the codec has one. The audio is cut to the length of the video.
        `overwrite` replaces an older file, but no folder of images.
        """
        self.path, self.fps, self.codec = Path(path), checked_rate(fps), codec_named(codec)
        self._format = container_of(self.codec, self.path)
        self._bit_depth, self._hardware, self._quality = bit_depth, hardware, quality
        self.encoding = find_encoding(self.codec, bit_depth, alpha=bool(alpha), hardware=hardware)
        self.encoding.options(quality)
        self.keeps_alpha = alpha is not False and bool(self.codec.alpha_formats)
        self._drops_alpha = alpha is None and not self.keeps_alpha
        self._dither = self.codec.lossy if dither is None else dither
        # Empty audio counts as none: some players stop at an empty track.
        self._audio = audio if audio and audio.waveform.shape[1] else None
        self._sound_encoder = sound_encoder(self.codec, self.path) if self._audio else ""
        self._metadata = dict(metadata or {})
        if self.codec.is_sequence:
            self.path = self.path.with_suffix("")
            folders = (each.with_suffix("") for each in others) if others else None
            self._new = whole_folder(self.path, others=folders)
        else:
            self._new = whole_file(self.path, overwrite=overwrite, others=others)
        self.frames = 0
        self._shape = torch.Size((0, 0, 3))
        self._stack = ExitStack()
        self._draft = Draft(self.path, self.path)
        self._output: tuple[OutputContainer, VideoStream | SegmentEncoder, FrameMaker] | None = None
        self._sound: SoundTrack | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of pictures that keeps the depth of the file."""
        return picture_dtype(self.encoding.pixel_format, self.encoding.bit_depth, self._dither)

    def __enter__(self) -> "VideoWriter":
        self._draft = self._stack.enter_context(self._new)
        self._stack.push(self._close)
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401, as ExitStack takes them
        self._stack.__exit__(*error)
        self.path = self._draft.path

    def check(self, height: int, width: int, channels: int = 3) -> None:
        """Check before any work that frames can be stored, with alpha if `channels` is 4."""
        check_size(self.codec.name, height, width)
        find_encoding(self.codec, self._bit_depth, alpha=self.keeps_alpha and channels == 4)
        if channels == 4 and self._drops_alpha:
            text = "Fast Video VAE: %s stores no alpha channel; that of the frames is dropped"
            LOG.info(text, self.codec.name)
            self._drops_alpha = False  # reported

    def pictures(self, frames: Tensor) -> Tensor:
        """Convert `[1, C, T, H, W]` in about [-1, 1] to pictures for `write`, on its device."""
        return pictures_of(frames, self.dtype, alpha=self.keeps_alpha)

    def write(self, frames: Tensor) -> None:
        """Append `[T, H, W, C]`, uint8, uint16 or floats in [0, 1]; all of one size."""
        known = frames.is_floating_point() or frames.dtype in WHITE
        channels = (3, 4) if self.keeps_alpha else (3,)
        if frames.ndim != 4 or frames.shape[-1] not in channels or not known:
            expected = " or ".join(map(str, channels))
            raise ValueError(
                f"frames are {list(frames.shape)} {frames.dtype}; expected [T, H, W, {expected}] "
                "uint8, uint16 or float"
            )
        if self._output is None:
            self.check(*frames.shape[1:])
        with errors_name(self.path):
            if self._output is None:
                self._shape = frames.shape[1:]
                self._open(frames.dtype)
            container, stream, make = cast(Any, self._output)
            if frames.shape[1:] != self._shape:
                raise ValueError(
                    f"frames are {_size(frames.shape[1:])}; expected {_size(self._shape)}"
                )
            for picture in frames.detach().cpu().contiguous():
                packets = stream.encode(make(picture, self.frames))
                self.frames += 1
                self._mux(container, packets)

    def _mux(self, container: OutputContainer, packets: list[Packet]) -> None:
        """Store packets of frames, and the sound up to the frames that are encoded."""
        # The stream of the sound follows that of the frames, which is there with their packets.
        if packets and self._audio and not self._sound:
            self._sound = SoundTrack(self._audio, container, self._sound_encoder)
        container.mux(packets)
        if self._sound:
            self._sound.write_until(self.frames / self.fps)

    def cancel(self) -> None:
        """Make `write` raise in another thread, even while the encoder hangs."""
        if self._output is not None and isinstance(self._output[1], SegmentEncoder):
            self._output[1].cancel()

    def _open(self, dtype: torch.dtype) -> None:
        """Open the encoder and the file with all of its streams."""
        depth, alpha = self._bit_depth, self._shape[2] == 4
        if depth is None and dtype == torch.uint8 and 8 in self.codec.formats:
            depth = 8
        self.encoding = find_encoding(self.codec, depth, alpha=alpha, hardware=self._hardware)
        try:
            self._open_encoder(dtype)
        except FFmpegError:
            # Hardware limits the size and the number of videos at a time.
            software, failed = find_encoding(self.codec, depth, alpha=alpha), self.encoding.encoder
            if failed == software.encoder:
                raise
            text = "Fast Video VAE: %s failed at %s; using software"
            LOG.info(text, failed, _size(self._shape))
            self.encoding = software
            self._open_encoder(dtype)

    def _open_encoder(self, dtype: torch.dtype) -> None:
        """Open the encoder as `encoding` says, and the file."""
        encoder, bit_depth, pixels = self.encoding
        maker = FrameMaker(self.codec.name, pixels, bit_depth, self._dither, self.fps)
        context: dict[str, Any] = dict(maker.tags)
        if self.codec.name == "hevc" and self._format in ("mp4", "mov"):
            context["codec_tag"] = "hvc1"  # required by Apple's players
        if encoder.startswith("prores"):
            # The next frame is converted while one is encoded.
            context |= {"thread_type": "FRAME", "thread_count": PRORES_THREADS}
        dithered = self._dither and bit_depth == 8 and dtype != torch.uint8
        options = self.encoding.options(self._quality, dithered=dithered)
        size = self._shape[1], self._shape[0]
        settings = Settings(encoder, options, self.fps, size, pixels, context)
        with ExitStack() as stack:
            if self.codec.is_sequence:
                folder = ImageFolder(self._draft.part, self.codec.suffix, self._metadata)
                container = cast(OutputContainer, folder)
            else:
                container = new_container(self._draft.part, self._format, self._metadata)
            stack.callback(container.close)
            serves = SegmentEncoder.serves(encoder)
            stream = (SegmentEncoder if serves else add_stream)(container, settings)
            stack.pop_all()
        self._output = container, stream, maker

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish or discard the file; runs before `whole_file` renames or removes it."""
        if kind is None and not self.frames:
            raise ValueError(f"no frames were written to {self.path}; expected at least one")
        if self._output is None:
            return
        container, stream = self._output[:2]
        try:
            if kind is None:
                with errors_name(self.path), closing(container):
                    last = stream.encode(None)
                    if self.encoding.encoder == "libx265" and self.frames <= X265_DELAY:
                        for packet in last:
                            packet.dts = packet.pts
                    self._mux(container, last)
                    if self._sound:
                        self._sound.close()
                return
            # Closing copies the whole file to move the index to the front, unless the name is gone.
            # Windows keeps the name of an open file.
            with suppress(OSError):
                self._draft.part.unlink()
            # Another error is being raised; this one repeats it for the same disk.
            with suppress(FFmpegError):
                container.close()
        finally:
            if isinstance(stream, SegmentEncoder):
                stream.close()


def new_container(
    part: Path, format: str, metadata: Mapping[str, str], *, exact: bool = False
) -> OutputContainer:
    """Open a new file for writing in one of FFmpeg's formats, with tags.

    With `exact` the same content is the same file: Matroska gets no random identity.
    """
    options = {"fflags": "bitexact"} if exact else {}
    if format in ("mp4", "mov"):
        # faststart moves the index to the front, so that a browser can play while it loads. Without
        # the other flag only tags that mp4 defines are kept.
        options["movflags"] = "faststart" + "+use_metadata_tags" * bool(metadata)
    container = av.open(f"file:{part}", "w", format=format, options=options)
    container.metadata.update(metadata)
    return container


def pictures_of(frames: Tensor, dtype: torch.dtype, *, alpha: bool = False) -> Tensor:
    """Convert `[1, 3 or 4, T, H, W]` in about [-1, 1] to `[T, H, W, C]` of `dtype`."""
    if frames.ndim != 5 or frames.shape[0] != 1 or frames.shape[1] not in (3, 4):
        raise ValueError(f"frames are {list(frames.shape)}; expected [1, 3 or 4, T, H, W]")
    return frames_to_images(frames if alpha else frames[:, :3], dtype=dtype)


def parts_of(frames: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Divide frames, so that pictures of a part take no more memory than all of them in uint8."""
    return frames.split(max(1, frames.shape[2] // dtype.itemsize), dim=2)


def _size(shape: tuple[int, ...]) -> str:
    """Return the text of a shape `(H, W, C)`."""
    return f"{shape[1]}x{shape[0]}" + (" with alpha" if shape[2] == 4 else "")


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Give FFmpeg's errors the final path and the message of the operating system, if any."""
    try:
        yield
    except FFmpegError as error:
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ValueError(f"{path} cannot be encoded ({reason(error)})") from error
