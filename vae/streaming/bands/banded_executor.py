"""The executor of several devices: each runs its band in a thread, and one target has the results.

An error of any device ends the work of all, as a `DeviceError`.
"""

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from ....kernels import is_out_of_memory
from ...background_writer import TICK_S
from ...layers.temporal_cache import TemporalCache
from ...models.executor import Executor
from ...planning.bands import Band, Bands
from ..memory import bare
from ..output import Output
from ..tiled_executor import TiledDecode, TiledExecutor
from .member import Announced, Member, Work
from .ranks import Rank, RankError, RankMember

_REASON_LENGTH = 120


class DeviceError(RuntimeError):
    """A device failed, by its `number` in the list of the VAE; the message is one line."""

    def __init__(self, band: Band, error: Exception) -> None:
        text = " ".join(str(error).split())[:_REASON_LENGTH] or type(error).__name__
        reason = f"memory ran out ({text})" if is_out_of_memory(error) else text
        super().__init__(f"{band.name} failed: {reason}")
        self.number = band.number


class BandedExecutor(Executor):
    """An executor that divides the frames between `devices`, by number.

    `output` takes the frames of a decode; None: it is an encode.
    """

    records = False

    def __init__(
        self,
        work: Work,
        bands: Bands,
        devices: Mapping[int, torch.device | Rank],
        output: Output | None,
    ) -> None:
        self._output, self._stopped = output, threading.Event()
        self._members: list[tuple[Band, Member | RankMember, ThreadPoolExecutor]] = []
        self._futures: list[Future[None]] = []
        self._announced: Announced = None
        on_cpu = [x for x in bands.members if devices[x.number] == torch.device("cpu")]
        own_cores = torch.get_num_threads()
        cores = max(1, own_cores // max(1, len(on_cpu)))
        try:
            for band in bands.members:
                rank, name = devices[band.number], f"fast-video-vae-{band.number}-{band.name}"
                with self._watched(band):
                    if isinstance(rank, Rank):
                        member: Member | RankMember = RankMember(rank, work, band)
                    else:
                        member = Member(work, band, self._stopped)
                pool = ThreadPoolExecutor(1, name)
                self._members.append((band, member, pool))
                # The thread starts here, where no signal can separate it from the pool.
                pool.submit(_use_cores, cores if band in on_cpu else None).result()
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_num_threads(own_cores)  # the default of other threads again
        own = (x for _, x, _ in self._members if isinstance(x, Member))
        self._own: TiledExecutor = next(x for x in own if x.device == work.job.device).executor
        if output is not None and isinstance(self._own, TiledDecode):
            self._own.output = output
        super().__init__([[]], self._own.cache, 0)

    @property
    def caches(self) -> list[TemporalCache]:
        """The caches of all devices of this process."""
        return [cache for _, each, _ in self._members for cache in each.caches]

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk; all devices need as many of its first frames."""
        self._announced = frames, repeats
        return self._own.takes(frames, repeats)

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through, on all devices; yield its results."""
        target, announced, self._announced = self._own.target(x), self._announced, None
        for band, member, pool in self._members:
            task = self._watched(band)(member.task(x, target, announced))
            self._futures.append(pool.submit(contextvars.copy_context().run, task))
        errors = self._errors()
        if errors:
            ending = min(errors, key=_order)
            errors.clear()
            try:
                # Without the traceback in its thread, whose frames hold what the device computed.
                raise bare(ending) if isinstance(ending, DeviceError) else ending
            finally:
                del ending  # whose traceback has this frame
        yield from self._own.rest(target)

    def close(self) -> None:
        """End all threads, and free what they used."""
        interrupt: BaseException | None = None
        while self._members:
            try:
                self._errors(stops=True)
                for _, _, pool in self._members:
                    pool.shutdown()
                self._members.clear()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _errors(self, *, stops: bool = False) -> list[BaseException]:
        """Wait for the devices, and return their errors; the first one, or `stops`, ends all."""
        left = set(self._futures)
        while left or stops:
            if stops or self._stopped.is_set():
                self._stop()
            # On Windows a wait without a timeout blocks signals.
            stops, (_, left) = False, wait(left, TICK_S, FIRST_EXCEPTION)
        found = [each.exception() for each in self._futures]
        self._futures.clear()
        return [each for each in found if each is not None]

    def _stop(self) -> None:
        """End the work of all devices between two layers."""
        self._stopped.set()
        for _, member, _ in self._members:
            member.stop()

    @contextlib.contextmanager
    def _watched(self, band: Band) -> Iterator[None]:
        """Let an error of a device in the block end the work of the others, too."""
        try:
            yield
        except BaseException as error:
            self._stopped.set()
            is_of_caller = self._output is not None and error is self._output.error
            follows = isinstance(error, (InterruptedError, RankError))
            if follows or is_of_caller or not isinstance(error, Exception):
                raise
            raise DeviceError(band, error) from None


def _use_cores(count: int | None) -> None:
    """Use `count` cores of the CPU in this thread; None: it has another device."""
    # Without a number some ops of a new thread run on all cores of the machine.
    if count is not None:
        torch.get_num_threads()  # sets the default, which would replace the number later
        torch.set_num_threads(count)


def _order(error: BaseException) -> int:
    """Return what is smallest for the error that ended the work: a stop, or that of a device."""
    if isinstance(error, InterruptedError):
        return 4  # it follows another one
    kinds = RankError, DeviceError, Exception
    return next((n for n, kind in enumerate(kinds, 1) if isinstance(error, kind)), 0)
