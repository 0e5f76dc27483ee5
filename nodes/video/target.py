"""The file of a video in ComfyUI's folders, written by a thread while the frames are decoded.

A sequence of images is a folder there.
"""

import functools
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from comfy.cli_args import args
from comfy.model_management import throw_exception_if_processing_interrupted
from torch import Tensor

# The writer is imported on first use, so that ComfyUI starts without it.
from ... import vae as library
from ...vae import media
from ..host.api import io, ui
from ..host.error_text import about
from ..host.numbering import saved, unused_names

if TYPE_CHECKING:
    from ...vae.media import Audio, VideoWriter

FOLDERS = (io.FolderType.output.value, io.FolderType.temp.value)

_RANGE = re.compile(r"\s*(\d+)\s*(-\s*(\d*))?\s*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class VideoTarget:
    """Settings of a video file; None: those of the codec."""

    fps: Fraction
    codec: str  # one of `available_codecs`
    quality: int  # 0 to 100
    hardware: bool
    prefix: str
    folder: str  # one of `FOLDERS`
    bit_depth: int | None = None
    dither: bool | None = None
    alpha: bool | None = None

    @cached_property
    def _model(self) -> "VideoWriter":
        """A writer that writes nothing and knows the form of the pictures."""
        return self._writer(Path("x" + media.codec_named(self.codec).suffix))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of pictures that keeps the depth of the file."""
        return self._model.dtype

    @property
    def keeps_alpha(self) -> bool:
        """Whether the alpha channel of frames that have one is stored."""
        return self._model.keeps_alpha

    def check(self, height: int, width: int, channels: int = 3) -> None:
        """Check that the file can be written, before any work is done."""
        with about("codec"):
            self._model.check(height, width, channels)

    def sound(self, audio: dict[str, Any] | None, frames: range) -> "Audio | None":
        """Return the part of an AUDIO, or None, during the given frames of the video."""
        if audio is None:
            return None
        if media.codec_named(self.codec).is_sequence:
            raise ValueError(f"audio: {self.codec} is a sequence of images, which has no audio")
        waveform, rate = audio["waveform"], int(audio["sample_rate"])
        first, last = (round(frame / self.fps * rate) for frame in (frames.start, frames.stop))
        with about("audio"):
            return media.Audio(waveform[0, :, first:last], rate)

    def write(
        self,
        pieces: Iterator[Tensor],
        height: int,
        width: int,
        audio: "Audio | None",
        tags: dict[str, str],
    ) -> tuple[Path, ui.SavedResult]:
        """Write pictures `[n, H, W, C]` to a file, and return its path and frontend entry."""
        with closing(pieces):
            kind, suffix = io.FolderType(self.folder), media.codec_named(self.codec).suffix
            names = unused_names(self.prefix, kind, suffix, height, width)
            path = next(names)
            with self._writer(path, audio, tags, names) as writer:
                with media.BackgroundWriter(
                    writer.write, dtype=self.dtype, cancel=writer.cancel
                ) as background:
                    for pictures in pieces:
                        put = functools.partial(background.put, pictures)
                        library.retried(put, torch.device("cpu"), "a decode")
                throw_exception_if_processing_interrupted()
        shown = min(writer.path.iterdir()) if writer.codec.is_sequence else writer.path
        return writer.path, saved(shown, kind)

    def _writer(
        self,
        path: Path,
        audio: "Audio | None" = None,
        tags: dict[str, str] | None = None,
        others: Iterator[Path] | None = None,
    ) -> "VideoWriter":
        return media.VideoWriter(
            path,
            self.fps,
            codec=self.codec,
            quality=self.quality,
            hardware=self.hardware,
            audio=audio,
            metadata=tags,
            bit_depth=self.bit_depth,
            dither=self.dither,
            alpha=self.alpha,
            others=others,
        )


def frame_range(text: str, count: int | None) -> range:
    """Parse `40-80`, `40-`, `40` or all; without a `count` only the syntax is checked."""
    if not text.strip():
        return range(count or 0)
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"frames is {text!r}; expected the first and the last, such as 40-80")
    if count is None:
        return range(0)
    first = int(match[1])
    last = int(match[3]) if match[3] else count - 1 if match[2] else first
    if not first <= last < count:
        raise ValueError(f"frames is {text!r}; the video has the frames 0-{count - 1}")
    return range(first, last + 1)


def workflow_tags(hidden: io.HiddenHolder | None) -> dict[str, str]:
    """Return the prompt and the workflow in `hidden` as tags, unless metadata is disabled."""
    if hidden is None or args.disable_metadata:
        return {}
    tags = dict(hidden.extra_pnginfo or {})
    if hidden.prompt is not None:
        tags["prompt"] = hidden.prompt
    # The frontend looks for the end of a WebM tag by counting braces, those of texts included.
    return {
        key: _JSON_STRING.sub(
            lambda text: text[0].replace("{", r"\u007b").replace("}", r"\u007d"), json.dumps(value)
        )
        for key, value in tags.items()
    }
