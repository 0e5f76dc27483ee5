"""The video that comes in, and where a run has to begin to read it.

A run reads it from any frame on that later results still need. A tensor, a list or a `Rereadable`
is read again. What an iterator yields is kept until no result needs it.
"""

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from ..models.base import Network
from ..models.config import VAEConfig
from ..models.receptive_field import frames_before, is_encoder, latents_before
from ..validation import check_range
from .upload import uint16_as_int16

# Stop of a range that ends with the video, whose length is unknown.
OPEN_END = sys.maxsize


class Rereadable:
    """A video in pieces that can be read again, such as that of a file.

    It is read from its start, and pieces before the wanted frame are dropped: frames of a file that
    depend on others, and varying rates, allow no exact jump.

    Args:
        read: Returns an iterator of pieces `[B, C, t, H, W]`, the same ones in each call.
    """

    def __init__(self, read: Callable[[], Iterator[Tensor]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Tensor]:
        return self._read()


class Source:
    """The checked pieces of a video.

    The pieces of an iterator are copied to the host in their dtype while a result needs them: the
    caller may reuse their memory when the next one is requested, and a device has no room for them.

    `check` raises a `ValueError`: for a tensor now, for a piece when it is reached, with the frame
    that it begins `at`.
    """

    def __init__(self, given: Tensor | Iterable[Tensor], check: Callable[..., None]) -> None:
        self.tensor: Tensor | None = None  # the whole video; None: it arrives in pieces
        self.failed = False  # an iterator, a file or a check has ended the video
        self._given, self._check = given, check
        self._iterator: Iterator[Tensor] | None = None  # of pieces that are there once
        self._shape: torch.Size | None = None  # of the first piece
        self._seen = 0  # frames that were checked
        self._kept: deque[Tensor] = deque()
        self._start = 0  # number of the first kept frame
        self._arrived: Tensor | None = None  # a piece of the iterator that is not kept yet
        if isinstance(given, Tensor) or not isinstance(given, Iterable):
            check(given)
            self.tensor = uint16_as_int16(given)
        elif not isinstance(given, (list, tuple, Rereadable)):
            self._iterator = iter(given)

    def read(self, first: int, stop: int | None = None) -> Iterator[Tensor]:
        """Return the pieces from frame `first` on, which is not before that of `release`.

        Frames from `stop` on are left out of a tensor; other pieces end with the video.
        """
        if self.tensor is not None:
            return iter([self.tensor[:, :, first:stop]])
        return self._from(first)

    def _from(self, first: int) -> Iterator[Tensor]:
        once = self._iterator
        at, pieces = (0, self._again()) if once is None else (self._start, self._once(first, once))
        try:
            for piece in pieces:
                skipped = max(0, first - at)
                at += piece.shape[2]
                if at > first:
                    yield piece[:, :, skipped:]
        except Exception as error:
            self.failed = self.failed or not is_out_of_memory(error)  # another run would meet it
            raise

    def release(self, first: int) -> None:
        """Free what was kept before frame `first`: nothing needs it any more."""
        while self._kept and self._start + self._kept[0].shape[2] <= first:
            self._start += self._kept.popleft().shape[2]

    def _again(self) -> Iterator[Tensor]:
        """Yield all pieces of a video that can be read again."""
        at = 0
        for piece in self._given:
            if at >= self._seen:
                self._look(piece, at)
                self._seen = at + piece.shape[2]
            at += piece.shape[2]
            yield uint16_as_int16(piece)

    def _once(self, first: int, iterator: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the kept pieces, and then the next ones, which are kept from frame `first` on."""
        kept = deque(self._kept)
        while (piece := kept.popleft() if kept else self._next(iterator)) is not None:
            self.release(first)
            yield piece

    def _next(self, iterator: Iterator[Tensor]) -> Tensor | None:
        """Check, keep and return the next piece; None after the last."""
        if self._arrived is None:
            self.failed = True  # an iterator that raises cannot go on, for a lack of memory either
            self._arrived = next(iterator, None)
            self.failed = False
        piece = self._arrived
        if piece is None:
            return None
        self._look(piece, self._seen)
        piece = uint16_as_int16(piece.detach())
        kept = piece.to("cpu", copy=True)
        # What fails before this line is repeated by the next run.
        self._kept.append(kept)
        self._seen, self._arrived = self._seen + piece.shape[2], None
        return kept if piece.device.type == "cpu" else piece

    def _look(self, piece: Tensor, at: int) -> None:
        self._check(piece, at=at)
        if self._shape is None:
            self._shape = piece.shape
        first = self._shape
        if piece.shape[:2] != first[:2] or piece.shape[3:] != first[3:]:
            raise ValueError(
                f"a piece has shape {list(piece.shape)}; expected {list(first)}, "
                "as the first piece, with any number of frames"
            )


class Start(NamedTuple):
    """Where a run begins."""

    given: int  # the first latent of a decode, or frame of an encode, that it reads
    result: int  # its first frame of a decode, or latent of an encode
    begins: bool  # it begins as a video does; otherwise what comes before is unknown


class Part:
    """The wanted frames of a decode, or latents of an encode.

    A run for a result begins with the latents, or frames, in its receptive field: 38 latents before
    it in a decode of Wan 2.1, 112 frames in an encode. A `ValueError` is raised for `frames` that
    are no range of frames of the `video`; without a video its length is unknown.
    """

    def __init__(
        self, network: Network, config: VAEConfig, video: Tensor | None, frames: range | None
    ) -> None:
        self._network, self._config = network, config
        self._encodes = is_encoder(network)
        if frames is not None:
            check_range(frames, None if video is None else config.frames(video.shape[2]))
        self.wanted = range(OPEN_END) if frames is None else frames

    @property
    def stop(self) -> int | None:
        """The latent after the last one that is needed; None: all are."""
        if self.wanted.stop == OPEN_END:
            return None
        return self._latent(self.wanted.stop - 1) + 1

    def start(self, result: int) -> Start:
        """Return where a run begins whose `result` and later ones are right."""
        config = self._config
        latent = max(0, self._latent(result) - self._before)
        frame = latent and config.frames(latent)
        begins = not latent or config.is_of_pictures
        return Start(frame, latent, begins) if self._encodes else Start(latent, frame, begins)

    def check_end(self, result: int) -> None:
        """Raise a `ValueError` if the video has ended before `result`, which is wanted."""
        if result < self.wanted.stop:
            raise ValueError(
                f"frames are {self.wanted!r}; the video ends before frame {result}; "
                "expected a part of the video"
            )

    def _latent(self, result: int) -> int:
        """Return the latent of a result."""
        return result if self._encodes else -(-result // self._config.temporal_compression)

    @functools.cached_property
    def _before(self) -> int:
        """Latents before one that its results depend on."""
        if self._config.is_of_pictures:
            return 0
        if self._encodes:
            return -(-frames_before(self._network.layers()) // self._config.temporal_compression)
        return latents_before(self._network)
