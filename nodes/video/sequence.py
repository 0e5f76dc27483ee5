"""A VIDEO that is a folder of images."""

from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...vae.media import VideoFile, convert_pictures, read_video
from ..host.api import Input, InputImpl, Types


class ImageSequence(Input.Video):
    """The images of a folder by number, without their alpha, which are read on demand."""

    def __init__(self, folder: Path, fps: Fraction) -> None:
        self.paths = sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
        self._fps = fps

    @cached_property
    def _first(self) -> VideoFile:
        return read_video(self.paths[0])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the images, `[N, H, W, 3]`."""
        return len(self.paths), self._first.height, self._first.width, 3

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, numbers: Iterable[int]) -> Tensor:
        """Return the images of some `numbers`, `[n, H, W, 3]` float32 in [0, 1]."""
        pictures = (next(read_video(self.paths[number]).frames()) for number in numbers)
        return torch.cat([convert_pictures(picture[None], torch.float32) for picture in pictures])

    def get_components(self) -> Types.VideoComponents:
        """Return all images as an IMAGE `[N, H, W, 3]` float32, and the frame rate."""
        return Types.VideoComponents(images=self[range(len(self))], frame_rate=self._fps)

    def save_to(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, as ComfyUI's
        """Encode the images to a file, with ComfyUI's arguments."""
        self._in_memory().save_to(*args, **kwargs)

    def as_trimmed(self, *args: Any, **kwargs: Any) -> Input.Video | None:  # noqa: ANN401
        """Return a part of the video, or None if the video is shorter."""
        return self._in_memory().as_trimmed(*args, **kwargs)

    def get_dimensions(self) -> tuple[int, int]:
        """Return width and height in pixels."""
        return self._first.width, self._first.height

    def get_bit_depth(self) -> int:
        """Return the bits per component."""
        return self._first.bit_depth

    def get_frame_count(self) -> int:
        """Return the number of images."""
        return len(self)

    def get_frame_rate(self) -> Fraction:
        """Return the frames per second."""
        return self._fps

    def get_duration(self) -> float:
        """Return the duration in seconds."""
        return float(len(self) / self._fps)

    def _in_memory(self) -> Input.Video:
        video = InputImpl.VideoFromComponents
        try:
            return video(self.get_components(), bit_depth=min(10, self.get_bit_depth()))
        except TypeError:  # ComfyUI before 0.33 writes 8 bits
            return video(self.get_components())
