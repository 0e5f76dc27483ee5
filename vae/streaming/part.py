"""The part of a video that a decode computes: some of its frames, and the latents that they need.

A decode can go on from any frame with `Part.rest`: it takes the latents before that frame again, to
fill the caches of the convolutions. Those of an iterable are kept until no frame needs them.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ...kernels import is_out_of_memory
from ..models.base import Network
from ..models.config import SEEDVR2, VAEConfig
from ..models.receptive_field import latents_before
from ..validation import check_range, checked

# Stop of a range of frames that ends with the video, whose length is unknown.
OPEN_END = sys.maxsize


class Part:
    """Frames of a video in order, and the latents that they need."""

    def __init__(
        self,
        latent: Tensor | Iterable[Tensor],
        frames: range | None,
        decoder: Network,
        config: VAEConfig,
        check: Callable[..., None],
        *,
        keeps: bool = False,
    ) -> None:
        self.frames, self.start, self.origin = frames, 0, 0
        self._decoder, self._config = decoder, config
        self._latent: Tensor | None = None
        self._kept: KeptPieces | None = None
        self.source = checked(latent, check)
        if isinstance(latent, Tensor):
            self._latent = latent
            if frames is not None:
                check_range(frames, config.frames(latent.shape[2]))
                self._take(latent, frames)
        else:
            if frames is not None:
                check_range(frames, None)
            if keeps:
                self.source = self._kept = KeptPieces(self.source)
        if frames is not None:
            self.origin = frames.start

    @property
    def known(self) -> bool:
        """Whether all latents are at hand."""
        return self._latent is not None

    @property
    def single_frame(self) -> bool:
        """Whether the video is known to have one frame."""
        return self._latent is not None and self._latent.shape[2] == 1

    @property
    def begins(self) -> bool:
        """Whether latent `start` is decoded as the first one of a video."""
        return not self.start or self._config.is_of_pictures

    @property
    def first(self) -> int:
        """The first wanted frame."""
        return 0 if self.frames is None else self.frames.start

    @property
    def first_frame(self) -> int:
        """The first frame of latent `start`."""
        return self.start and self._config.frames(self.start)

    def passed(self, frame: int) -> None:
        """Release the latents that only frames before `frame` need; `rest` does not go back."""
        if self._kept is not None:
            self._kept.release(self._needed(range(frame, frame + 1))[0])

    def rest(self, frame: int) -> "Part":
        """Return the part from `frame` on, not before the last `passed`; this one is of no use."""
        rest = copy.copy(self)
        if self._latent is not None:
            length = self._config.frames(self._latent.shape[2])
            rest.frames = range(frame, length if self.frames is None else self.frames.stop)
            rest._take(self._latent, rest.frames)
            return rest
        if self._kept is None:
            raise RuntimeError("the latents were not kept; expected keeps=True")
        rest.frames = range(frame, OPEN_END if self.frames is None else self.frames.stop)
        rest.start, rest.source = self._kept.again(self._needed(range(frame, frame + 1))[0])
        rest._kept = None
        return rest

    def _take(self, latent: Tensor, frames: range) -> None:
        self.start, stop = self._needed(frames)
        self.source = iter([latent[:, :, self.start : stop]])

    def _needed(self, frames: range) -> tuple[int, int]:
        """Return the first latent that `frames` need, and the one after the last."""
        per_latent = self._config.temporal_compression
        first, last = (-(-frame // per_latent) for frame in (frames.start, frames.stop - 1))
        if self._config.family == SEEDVR2:  # its layers treat the second frame differently
            return 0, last + 1
        before = 0 if self._config.is_of_pictures else latents_before(self._decoder)
        return max(0, first - before), last + 1


class KeptPieces(Iterator[Tensor]):
    """The latents of an iterable, copied while they may be needed again."""

    # Copied, because the caller may reuse the memory of a piece when the next one is requested. A
    # latent of 720 x 1280 has 0.9 MB, a thousandth of the caches. Where the device has no room for
    # that, the copy is on the host.

    def __init__(self, source: Iterator[Tensor]) -> None:
        self._source = source
        self._kept: deque[Tensor] = deque()
        self._start = 0  # number of the first kept frame

    def __next__(self) -> Tensor:
        piece = next(self._source)
        try:
            copied = piece.clone()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            copied = piece.to("cpu", copy=True)
        self._kept.append(copied)
        return piece

    def release(self, first: int) -> None:
        """Release the pieces that have only frames before number `first`."""
        while self._kept and self._start + self._kept[0].shape[2] <= first:
            self._start += self._kept.popleft().shape[2]

    def again(self, first: int) -> tuple[int, Iterator[Tensor]]:
        """Return the number of a latent up to `first`, and the pieces from there, once."""
        self.release(first)
        if self._kept:
            self._kept[0] = self._kept[0][:, :, max(0, first - self._start) :]
            self._start = max(first, self._start)
        return self._start, self._followed()

    def _followed(self) -> Iterator[Tensor]:
        while self._kept:
            yield self._kept.popleft()
        yield from self._source
