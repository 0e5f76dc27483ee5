"""The frames of a video at their new size, from any frame on, read ahead by a thread."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any, NamedTuple

import av
import torch
from av.error import BlockingIOError as NotYet
from comfy.model_management import throw_exception_if_processing_interrupted
from torch import Tensor

from ...vae import media
from ..video.source import Fit, Images, Source, about_video

# Frames that wait for the model, and most bytes of them: 86 frames of 1920 x 1080 in 8 bits.
_AHEAD, _AHEAD_BYTES = 128, 512 << 20
_TICK_S = 0.1
# FFmpeg's documentation of its filter `select` advises a score from 0.3 to 0.5.
_SCORE = 0.3
# Frames are compared at this width: the score is a mean over pixels.
_WIDTH = 320


class Frame(NamedTuple):
    """A frame of the video."""

    number: int
    picture: Tensor  # `[H, W, 3]` at the new size, in [0, 1], or uint8
    is_cut: bool  # a scene begins here

    def image(self) -> Tensor:
        """Return `[1, H, W, 3]` float32 in [0, 1]."""
        picture = self.picture.unsqueeze(0)
        return picture if picture.is_floating_point() else picture.float() / 255


class Reader:
    """Frames in order; use it as a context manager.

    Args:
        source: The video, which only this reader reads.
        resize: Takes images `[n, H, W, 3]` to the new size.
        cuts: The frames that begin a scene; None: they are found.
    """

    def __init__(
        self, source: Source, resize: Callable[[Tensor], Tensor], cuts: Collection[int] | None = ()
    ) -> None:
        self._source, self._resize, self._cuts = source, resize, cuts
        self._pool: ThreadPoolExecutor | None = None
        self._frames: Any = None  # a generator
        self._coming: deque[Future[Frame | None]] = deque()
        self._ahead = 1
        self.number = 0  # of the next frame

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._frames.close()
        self._pool = None
        self._coming.clear()

    def seek(self, number: int) -> None:
        """Continue with a frame; other frames than the next one are read from the start."""
        if self._pool is None or self.number != number:
            self.__exit__()
            self._pool, self._frames = ThreadPoolExecutor(1), self._read(number)
            self.number = number

    def peek(self) -> Frame | None:
        """Return the next frame, which stays the next one; None: the video has ended."""
        while len(self._coming) < self._ahead:
            self._coming.append(self._pool.submit(self._following))
        throw_exception_if_processing_interrupted()
        while not self._coming[0].done():
            wait([self._coming[0]], _TICK_S)
            throw_exception_if_processing_interrupted()
        with about_video():
            frame = self._coming[0].result()
        if frame is not None:
            self._ahead = max(2, min(_AHEAD, _AHEAD_BYTES // frame.picture.nbytes))
        return frame

    def take(self) -> Frame | None:
        """Return the next frame; None: the video has ended."""
        frame = self.peek()
        if frame is not None:
            self._coming.popleft()
            self.number += 1
        return frame

    def images(self, count: int) -> Tensor:
        """Return the next `count` frames `[n, H, W, 3]`, or all that are left."""
        found = iter(self.take, None)
        return torch.cat([frame.image() for _, frame in zip(range(count), found, strict=False)])

    @torch.inference_mode()
    def _following(self) -> Frame | None:
        return next(self._frames, None)

    def _read(self, first: int) -> Iterator[Frame]:
        # The test sees every frame, so a cut does not depend on where the reading starts.
        begins = _begins(self._source.size, self._cuts)
        for number, picture in enumerate(Images(self._source, Fit())):
            is_cut = begins(number, picture[..., :3])
            if number >= first:
                yield Frame(number, self._resize(picture[None, ..., :3])[0], is_cut)


def _begins(size: tuple[int, int], cuts: Collection[int] | None) -> Callable[[int, Tensor], bool]:
    """Return a function of each frame and its number: whether a scene begins there.

    Without `cuts` a scene begins where a frame has little in common with the one before.
    """
    if cuts is not None:
        return lambda number, _: number in cuts
    height, width = size
    small, form, tick = min(width, _WIDTH), av.VideoFormat("rgb24"), Fraction(1)
    graph = av.filter.Graph()
    graph.link_nodes(
        graph.add_buffer(width=width, height=height, format=form, time_base=tick),
        graph.add("scale", f"{small}:{max(1, round(height * small / width))}:flags=area"),
        graph.add("select", f"gt(scene,{_SCORE})"),
        graph.add("buffersink"),
    ).configure()

    def begins(number: int, picture: Tensor) -> bool:
        pixels = media.convert_pictures(picture[None], torch.uint8)[0].contiguous()
        frame = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
        frame.pts, frame.time_base = number, tick
        graph.push(frame)
        try:
            return graph.pull().pts == number
        except NotYet:
            return False

    return begins
