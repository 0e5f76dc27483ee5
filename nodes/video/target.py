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

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class VideoTarget:
    """A video file of a rate and a codec, and its place in one of ComfyUI's folders."""

    fps: Fraction
    codec: str  # one of `available_codecs`
    prefix: str
    folder: str  # one of `FOLDERS`
    options: dict[str, Any]  # of `VideoWriter`

    @cached_property
    def form(self) -> "VideoWriter":
        """A writer that writes nothing: `dtype` and `keeps_alpha` of the pictures to write."""
        with about("codec"):
            return self._writer(Path("x" + media.codec_named(self.codec).suffix))

    def check(self, height: int, width: int, channels: int = 3) -> None:
        """Check that the file can be written, before any work is done."""
        form = self.form
        with about("codec"):
            form.check(height, width, channels)

    def sound(self, audio: dict[str, Any] | None, frames: range) -> "Audio | None":
        """Return the part of an AUDIO, or None, during the given frames of the video."""
        if audio is None:
            return None
        if self.form.codec.is_sequence:
            raise ValueError(f"audio: {self.codec} is a sequence of images, which has no audio")
        waveform, rate = audio["waveform"], int(audio["sample_rate"])
        first, last = (round(frame / self.fps * rate) for frame in (frames.start, frames.stop))
        with about("audio"):
            return media.Audio(waveform[0, :, first:last], rate)

    def write(
        self, pieces: Iterator[Tensor], size: tuple[int, int], audio: "Audio | None", tags: dict
    ) -> tuple[Path, ui.SavedResult]:
        """Write pictures `[n, H, W, C]` to a file, and return its path and frontend entry."""
        with closing(pieces):
            kind = io.FolderType(self.folder)
            names = unused_names(self.prefix, kind, self.form.codec.suffix, *size)
            path = next(names)
            with self._writer(path, others=names, audio=audio, metadata=tags) as writer:
                with media.BackgroundWriter(
                    writer.write, dtype=self.form.dtype, cancel=writer.cancel
                ) as background:
                    for pictures in pieces:
                        put = functools.partial(background.put, pictures)
                        library.retried(put, torch.device("cpu"), "a decode")
                throw_exception_if_processing_interrupted()
        shown = min(writer.path.iterdir()) if writer.codec.is_sequence else writer.path
        return writer.path, saved(shown, kind)

    def _writer(self, path: Path, **more: Any) -> "VideoWriter":  # noqa: ANN401
        return media.VideoWriter(path, self.fps, codec=self.codec, **self.options, **more)


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
