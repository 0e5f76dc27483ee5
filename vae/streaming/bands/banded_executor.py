"""The executor of several devices: each runs its band in a thread, and one piece holds the results.

An error of any device ends the work of all, as a `DeviceError`.
"""

import functools
import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from ....kernels import new_video
from ...layers.temporal_cache import TemporalCache
from ...models.receptive_field import causal_taps
from ...planning.bands import Bands
from ...planning.tiling import divided
from ..executor import Executor
from ..memory import bare
from ..output import TiledChunk
from ..tiled_executor import TiledEncode
from .crew import BandedWork, DeviceError
from .member import Member
from .worker import share_cores


class BandedExecutor(Executor):
    """An executor that divides the frames between devices."""

    records = False

    def __init__(self, work: BandedWork, bands: Bands, cache: TemporalCache) -> None:
        job = work.job
        first, rest = divided(job.network.chains(), bands.cut)
        own = next(band for band in bands.members if band.device == job.device)
        super().__init__(rest if job.spec.encodes else [[]], cache, own.part_bytes)
        self._tiled = first if job.spec.encodes else rest
        self._work, self._bands = work, bands
        self._members: list[Member] = []
        self._stopped = threading.Event()
        self._shares_cores = True
        for band in bands.members:
            try:
                self._members.append(Member(work, bands, band, self._stopped, first=cache.first))
            except Exception as error:
                raise DeviceError(band.number, band.device, bare(error)) from None

    @property
    def caches(self) -> list[TemporalCache]:
        """The cache of the video, then those of all devices."""
        return [self.cache, *(cache for each in self._members for cache in each.executor.caches)]

    def close(self) -> None:
        """End all threads, and free what they used."""
        self._stopped.set()
        interrupt: BaseException | None = None
        while self._members:
            try:
                self._members.pop().worker.end()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self, x: Tensor, target: TiledChunk | Tensor) -> None:
        """Run a chunk `x` `[B, C, T, H, W]` on all devices; their results go to `target`."""
        if self._shares_cores:
            share_cores([member.worker for member in self._members])
            self._shares_cores = False
        errors = self._errors(x, target)
        if not errors:
            return
        ending = min(errors, key=_rank)
        errors.clear()
        try:
            # Without the traceback in its thread, whose frames hold what the device computed.
            raise bare(ending) if isinstance(ending, DeviceError) else ending
        finally:
            del ending  # whose traceback has this frame

    def _errors(self, x: Tensor, target: TiledChunk | Tensor) -> list[BaseException]:
        """Run a chunk on all devices, and return their errors."""
        for member in self._members:
            task = member.task(x, target)
            member.worker.give(functools.partial(self._watched, member, task))
        outcomes = (member.worker.outcome() for member in self._members)
        return [error for error in outcomes if error is not None]

    def _watched(self, member: Member, do: Callable[[], None]) -> None:
        """Run the task of a device; an error ends the tasks of the others, too."""
        try:
            do()
        except BaseException as error:
            self._stopped.set()
            output = self._work.output
            follows = isinstance(error, InterruptedError)
            is_of_caller = output is not None and error is output.error
            if follows or is_of_caller or not isinstance(error, Exception):
                raise
            raise DeviceError(member.number, member.device, error) from None


def _rank(error: BaseException) -> tuple[bool, bool, bool]:
    """Return what is smallest for the error that ended the work: a stop, or that of a device."""
    is_error, is_device = isinstance(error, Exception), isinstance(error, DeviceError)
    return is_error, not is_device, isinstance(error, InterruptedError)


class BandedDecode(BandedExecutor):
    """A decoder on several devices; each writes its part of the frames to the output."""

    def takes(self, frames: int, repeats: int) -> int | None:
        """Return None: a decode needs all `frames` for any `repeats`."""
        return None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through; yield all of its frames together."""
        if self._work.output is None:
            raise ValueError("a decode has no output; expected one")
        chunk = self._work.output.chunk(x, first=self.cache.first)
        self._run(x, chunk)
        yield chunk.piece


class BandedEncode(BandedExecutor):
    """An encoder on several devices; the first one joins the bands, and runs the other layers."""

    _frames: int | None = None  # of the announced chunk
    _taken: int | None = None  # frames that the layers on whole frames need

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk of `frames` with `repeats` to all devices, then to the other layers."""
        self._frames = frames
        wanted: int | None = None
        for member in self._members:
            if isinstance(member.executor, TiledEncode):
                wanted = member.executor.takes_tiles(frames, repeats)
        behind = self._members[0].executor.behind
        self._taken = super().takes(behind.frames, behind.frames - behind.fresh + 1)
        return wanted

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through, on all devices first."""
        frames, self._frames = self._frames or x.shape[2], None
        whole = self._joined(x, frames)
        self._run(x, whole)
        yield from super().advance(whole[:, :, : self._taken])

    def _joined(self, x: Tensor, frames: int) -> Tensor:
        """Return memory for the results of all bands for a chunk of `frames`."""
        job = self._work.job
        channels, _, height, width = job.spec.shapes(job.start, single_frame=True)[self._bands.cut]
        if not self.cache.first:
            for chain in self._tiled:
                for layer in chain:
                    for _, stride in causal_taps(layer):
                        frames //= stride
        return new_video(x, (x.shape[0], channels, frames, height, width))
