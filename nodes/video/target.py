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

import folder_paths
import torch
from comfy.cli_args import args
from comfy.model_management import throw_exception_if_processing_interrupted
from torch import Tensor

# The writer is imported on first use, so that ComfyUI starts without it.
from ... import vae as library
from ...vae import media
from ..host import numbering
from ..host.api import io, ui
from ..host.error_text import about

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
        folder = Path(folder_paths.get_directory_by_type(self.folder))
        numbering.check_prefix(self.prefix, folder)
        with about("codec"):
            return self.writer(Path("x" + media.codec_named(self.codec).suffix))

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
            names = self.names(*size)
            with self.writer(next(names), others=names, audio=audio, metadata=tags) as writer:
                with media.BackgroundWriter(
                    writer.write, dtype=self.form.dtype, cancel=writer.cancel
                ) as background:
                    for pictures in pieces:
                        put = functools.partial(background.put, pictures)
                        library.retried(put, torch.device("cpu"), "a decode")
                throw_exception_if_processing_interrupted()
        return writer.path, self.saved(writer.path)

    def writer(self, path: Path, **more: Any) -> "VideoWriter":  # noqa: ANN401
        """Return a writer with these options, and `more`."""
        return media.VideoWriter(path, self.fps, codec=self.codec, **self.options, **more)

    def names(self, height: int, width: int) -> Iterator[Path]:
        """Yield unused names for the file."""
        kind = io.FolderType(self.folder)
        return numbering.unused_names(self.prefix, kind, self.form.codec.suffix, height, width)

    def saved(self, path: Path) -> ui.SavedResult:
        """Return the entry of the file for the frontend; of a folder that of its first image."""
        shown = min(path.iterdir()) if path.is_dir() else path
        return numbering.saved(shown, io.FolderType(self.folder))


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
