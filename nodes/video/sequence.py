"""A VIDEO that is a folder of images."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import Input, InputImpl, Types

from ...vae.media import pictures_as, read_video


class ImageSequence(Input.Video):
    """The images of a folder in the order of their names; they are read when a node needs them.

    Args:
        folder: The folder; it has at least one image.
        fps: Frames per second.
    """

    def __init__(self, folder: Path, fps: Fraction) -> None:
        self.paths = sorted(folder.iterdir())
        self._fps = fps

    def get_components(self) -> Types.VideoComponents:
        """Return all images as an IMAGE `[N, H, W, 3]` float32, and the frame rate."""
        pictures = (next(read_video(path).frames()) for path in self.paths)
        images = [pictures_as(picture[None], torch.float32) for picture in pictures]
        return Types.VideoComponents(images=torch.cat(images), frame_rate=self._fps)

    def save_to(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, as ComfyUI's
        """Encode the images to a file.

        Args:
            *args: As for ComfyUI's class.
            **kwargs: As for ComfyUI's class.
        """
        InputImpl.VideoFromComponents(self.get_components()).save_to(*args, **kwargs)

    def as_trimmed(self, *args: Any, **kwargs: Any) -> Input.Video | None:  # noqa: ANN401
        """Return a part of the video.

        Args:
            *args: As for ComfyUI's class.
            **kwargs: As for ComfyUI's class.

        Returns:
            The part, or None if the video is shorter.
        """
        return InputImpl.VideoFromComponents(self.get_components()).as_trimmed(*args, **kwargs)

    def get_dimensions(self) -> tuple[int, int]:
        """Return width and height in pixels."""
        video = read_video(self.paths[0])
        return video.width, video.height

    def get_frame_count(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def get_frame_rate(self) -> Fraction:
        """Return the frames per second."""
        return self._fps

    def get_duration(self) -> float:
        """Return the duration in seconds."""
        return float(len(self.paths) / self._fps)
