"""The frames of a video at their new size, from any frame on, read ahead by a thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_extras.nodes_post_processing import ResizeImageMaskNode
from torch import Tensor

from ...kernels import first_line, is_out_of_memory
from ..video.source import FileSource, Fit, Source, about_video

# Frames that wait for the model, and most bytes of them: 86 frames of 1920 x 1080 in 8 bits.
_AHEAD, _AHEAD_BYTES = 128, 512 << 20
_TOGETHER = 4  # frames of a tensor that are read at once
_TICK_S = 0.1
# Resized by Pillow, in 8 bits.
LANCZOS = "lanczos"


@dataclass(frozen=True)
class Resize:
    """A new size, as of ComfyUI's Resize Image."""

    multiplier: float
    shorter_side: int  # in pixels; 0: by the multiplier
    method: str

    def __call__(self, images: Tensor) -> Tensor:
        """Return `[n, H, W, 3]` in [0, 1] at the new size."""
        kind: dict[str, object] = {"resize_type": "scale by multiplier"}
        kind["multiplier"] = self.multiplier
        if self.shorter_side:
            kind = {"resize_type": "scale shorter dimension", "shorter_size": self.shorter_side}
        return ResizeImageMaskNode.execute(images, self.method, kind).args[0]

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the new height and width of frames."""
        height, width = self(torch.zeros(1, *size, 3)).shape[1:3]
        return height, width


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
        resize: The new size.
        cuts: Makes the test for cuts, for one pass over the video; None: it has none.
    """

    def __init__(
        self,
        source: Source,
        resize: Resize,
        cuts: Callable[[], Callable[[int, Tensor], bool]] | None = None,
    ) -> None:
        self._source, self._resize, self._cuts = source, resize, cuts
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._frames: queue.Queue[Frame | BaseException | None] = queue.Queue()
        self._next: list[Frame | None] = []  # the frame that was looked at
        self.number = 0  # of the next frame

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def seek(self, number: int) -> None:
        """Continue with a frame; other frames than the next one are read from the start."""
        if self._thread is None or self.number != number:
            self._close()
            stop, frames = threading.Event(), queue.Queue[Frame | BaseException | None](1)
            self._stop, self._frames, self._next, self.number = stop, frames, [], number
            arguments = number, frames, stop
            self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
            self._thread.start()

    def peek(self) -> Frame | None:
        """Return the next frame, which stays the next one; None: the video has ended."""
        if not self._next:
            self._next = [self._arrived()]
        return self._next[0]

    def take(self) -> Frame | None:
        """Return the next frame; None: the video has ended."""
        frame = self.peek()
        if frame is not None:
            self._next, self.number = [], self.number + 1
        return frame

    def images(self, count: int) -> Tensor:
        """Return the next `count` frames `[n, H, W, 3]`, or all that are left."""
        found = iter(self.take, None)
        return torch.cat([frame.image() for _, frame in zip(range(count), found, strict=False)])

    def _arrived(self) -> Frame | None:
        while True:
            throw_exception_if_processing_interrupted()
            try:
                item = self._frames.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if isinstance(item, RuntimeError) and not is_out_of_memory(item):
                raise ValueError(f"video: {first_line(item)}") from item
            if isinstance(item, BaseException):
                with about_video():
                    raise item
            return item

    def _close(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join()
        self._stop = self._thread = None

    def _work(self, first: int, frames: queue.Queue, stop: threading.Event) -> None:
        """Put the frames from `first` on, then None or an error, until `stop` is set."""

        def put(item: object) -> None:
            while not stop.is_set():
                try:
                    frames.put(item, timeout=_TICK_S)
                    return
                except queue.Full:
                    continue

        try:
            with torch.inference_mode():
                for frame in self._read(first):
                    frames.maxsize = max(2, min(_AHEAD, _AHEAD_BYTES // frame.picture.nbytes))
                    put(frame)
                    if stop.is_set():
                        return
            put(None)
        except BaseException as error:
            put(error)

    def _read(self, first: int) -> Iterator[Frame]:
        begins = None if self._cuts is None else self._cuts()
        number = 0
        for pictures in _pictures(self._source):
            # The test sees every frame, so a cut does not depend on where the reading starts.
            cuts = [begins is not None and begins(number + at, p) for at, p in enumerate(pictures)]
            skipped = max(0, first - number)
            if skipped < len(pictures):
                for at, picture in enumerate(self._resized(pictures[skipped:]), skipped):
                    yield Frame(number + at, picture, cuts[at])
            number += len(pictures)

    def _resized(self, pictures: Tensor) -> Tensor:
        whole = 1.0 if pictures.is_floating_point() else torch.iinfo(pictures.dtype).max
        images = self._resize(pictures.float() / whole)
        # A quarter of the memory for frames that wait, with the same values.
        return (images * 255).round().to(torch.uint8) if self._resize.method == LANCZOS else images


def _pictures(source: Source) -> Iterator[Tensor]:
    """Yield all frames `[n, H, W, 3]`, a few at a time: uint8, uint16, or floats in [0, 1]."""
    if isinstance(source, FileSource):
        yield from (piece[0].movedim(0, -1) for piece in source.pieces(Fit()))
        return
    for at in range(0, source.count, _TOGETHER):
        yield source.read(range(at, min(at + _TOGETHER, source.count)))[..., :3].float()
