"""Where a video goes: a new file in ComfyUI's folders, written by a thread as the frames come."""

import functools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
import torch
from comfy.cli_args import args
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io, ui
from torch import Tensor

# What writes is imported when it is asked for, so that ComfyUI starts without it.
from ... import vae as library
from ...vae import media
from ..host.error_text import about

if TYPE_CHECKING:
    from ...vae.media import Audio

_logger = logging.getLogger(__name__)

FOLDERS = (io.FolderType.output.value, io.FolderType.temp.value)

_RANGE = re.compile(r"\s*(\d+)\s*(-\s*(\d*))?\s*")


@dataclass(frozen=True)
class VideoTarget:
    """How a video is to be written.

    Attributes:
        codec: One of `available_codecs`.
        quality: 0 to 100.
        prefix: Folder and beginning of the file's name.
        folder: One of `FOLDERS`.
    """

    fps: Fraction
    codec: str
    quality: int
    hardware: bool
    prefix: str
    folder: str

    def check_size(self, height: int, width: int) -> None:
        """Raise a `ValueError` for frames that the codec cannot store."""
        with about("codec"):
            media.check_size(self.codec, height, width)

    def sound(self, audio: dict[str, Any] | None, frames: range) -> "Audio | None":
        """What is heard of an AUDIO while these frames of the video are shown.

        Raises:
            ValueError: It is none, or no encoder takes it.
        """
        if audio is None:
            return None
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
        """Write a file, which appears when it is whole; also say how the frontend finds it.

        The pieces are pictures `[n, H, W, C]` uint8 on any device. They are drawn while a thread
        writes those before; where anything fails they are closed.

        Raises:
            OSError: The disk is full, or the file may not be written.
            ValueError: The prefix leaves the folder, or the encoder failed.
            InterruptProcessingException: The user pressed stop. It derives from `BaseException`.
        """
        with closing(pieces):
            path, result = self._new_file(height, width)
            with media.VideoWriter(
                path,
                self.fps,
                codec=self.codec,
                quality=self.quality,
                hardware=self.hardware,
                audio=audio,
                metadata=tags,
            ) as writer:
                relief = library.Relief(torch.device("cpu"), "a decode")
                with media.BackgroundWriter(writer.write) as background:
                    for pictures in _opaque(pieces):
                        relief.finish(functools.partial(background.put, pictures))
                throw_exception_if_processing_interrupted()
        return path, result

    def _new_file(self, height: int, width: int) -> tuple[Path, ui.SavedResult]:
        """A name that no file has, by ComfyUI's way of counting."""
        directory = folder_paths.get_directory_by_type(self.folder)
        try:
            folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
                self.prefix, directory, width, height
            )
        except OSError:
            raise
        except Exception as error:  # ComfyUI's has no class of its own
            raise ValueError(
                f"filename_prefix is {self.prefix!r}; expected a name inside of the folder"
            ) from error
        file = f"{name}_{counter:05}_{media.codec_named(self.codec).suffix}"
        return Path(folder) / file, ui.SavedResult(file, subfolder, io.FolderType(self.folder))


def frame_range(text: str, count: int | None) -> range:
    """The frames that a user asks for.

    Args:
        text: The first and the last, such as `40-80`; `40-`: to the end; empty: all.
        count: How many there are; None: not known yet, only the words are looked at: no frames.

    Raises:
        ValueError: It is no range, or not of this video.
    """
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
    """The prompt and the workflow as tags of a file, unless the user wants none of that."""
    if hidden is None or args.disable_metadata:
        return {}
    tags = dict(hidden.extra_pnginfo or {})
    if hidden.prompt is not None:
        tags["prompt"] = hidden.prompt
    return {key: json.dumps(value) for key, value in tags.items()}


def _opaque(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """The colours alone; the log says so where there was more."""
    told = False
    for pictures in pieces:
        if pictures.shape[-1] == 4 and not told:
            _logger.info("Fast Video VAE: video files here have no alpha; it is left out")
            told = True
        yield pictures[..., :3]
