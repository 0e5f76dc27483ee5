"""The executor of several devices: each runs its band in a thread, and one piece holds the results.

A device that fails leaves the video, except the VAE's own, whose failure ends it. The others share
its band, and repeat the last chunks without output, because the tails of its convolutions are lost.
"""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....kernels import new_video
from ...layers.frame_runs import fitted
from ...layers.temporal_cache import TemporalCache
from ...models.receptive_field import causal_taps, frames_before, latents_before
from ...planning.bands import Band, Bands
from ...planning.job import StreamJob
from ...planning.tiling import divided
from ..executor import Executor, Tails
from ..output import TiledChunk
from ..tiled_executor import TiledEncode, join_tails
from .balance import Balance
from .crew import BandedWork
from .member import BandRelief, Member
from .worker import share_cores

_logger = logging.getLogger(__name__)

_Task = Callable[[Member], Callable[[], None]]


@dataclass(frozen=True)
class PastChunk:
    """A chunk that all devices have computed; they repeat it when one of them fails."""

    frames: int  # their number
    first: bool  # it was the first frame of the video
    again: Callable[[], Tensor]  # its first frames `[B, C, t, H, W]`; the others repeat the last

    def whole(self) -> Tensor:
        """Return all frames `[B, C, T, H, W]`."""
        return fitted(self.again(), self.frames)


class BandedExecutor(Executor):
    """An executor that divides the frames between devices."""

    records = False

    def __init__(self, work: BandedWork, bands: Bands, cache: TemporalCache) -> None:
        job = work.planner.job
        first, rest = divided(job.network.chains(), bands.cut)
        own = next(band for band in bands.members if band.number == work.planner.first)
        super().__init__(rest if job.spec.encodes else [[]], cache, own.part_bytes)
        self._tiled = first if job.spec.encodes else rest
        self._work, self._planner, self._bands = work, work.planner, bands
        self._members: dict[int, Member] = {}
        # Chunks that later results depend on, oldest first.
        self._history: deque[PastChunk] = deque()
        self._reach = _reach_of(job, bands)
        self._balance = Balance(work.team.crew, work.kind)
        self._pending: Bands | None = None
        self._stopped, self._releasing = threading.Event(), threading.Lock()
        self._error_of_caller: BaseException | None = None
        self._frames: int | None = None  # frames of the announced chunk
        self._done = 0
        self._shares_cores = True
        try:
            self._recruit()
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def caches(self) -> list[TemporalCache]:
        """The cache of the video, then those of all devices."""
        return [self.cache, *(cache for member in self._in_order() for cache in member.caches)]

    def park(self) -> bool:
        """Move the tails on the first device to the host; return whether that freed memory."""
        own = [each for each in self._in_order() if each.device == self._planner.job.device]
        return any([self.cache.park(), *(each.executor.park() for each in own)])

    def close(self) -> None:
        """End all threads, and free what they used."""
        self._stopped.set()
        interrupt: BaseException | None = None
        while self._members:
            _, member = self._members.popitem()
            try:
                member.close()
            except BaseException as error:
                interrupt = error
        super().close()
        self._history.clear()
        self._error_of_caller = None
        if interrupt is not None:
            raise interrupt

    def tails(self) -> Tails:
        """Return the tails `[B, C, context, H, W]` of whole frames of the bands' networks."""
        members = self._in_order()
        for member in members:
            member.executor.settle()
        own = self._members[self._planner.first].executor
        found = own.cache.tails()
        for conv in {conv for _, part in own.tiles for conv in part.cache.tails()}:
            pieces = [
                (tile, member.tail_of(conv, part.cache))
                for member in members
                for tile, part in member.executor.tiles
            ]
            found[conv] = join_tails(pieces, own.index_of(conv), own.sizes)
        return found

    def _compute(self, x: Tensor, frames: int, task: Callable[[Tensor], _Task]) -> None:
        """Run a chunk of `frames` on all devices, again without those that fail."""
        again = self.again
        if again is None or not self._work.known:
            host = self._work.relief.attempt(functools.partial(x.to, "cpu", copy=True))
            again = functools.partial(host.to, x.device, copy=True)
        past = PastChunk(frames, self.cache.first, again)
        if self._shares_cores:
            share_cores([member.worker for member in self._in_order()])
            self._shares_cores = False
        failures = self._each(task(x))
        while failures:
            self._dismiss(failures)
            failures = self._repeat(past, task)
        if len(self._members) > 1:  # an error of the first device ends the video
            self._remember(past)
        self._done += frames
        self._look((x.shape, self.cache.first))

    def _remember(self, past: PastChunk) -> None:
        """Keep a chunk, and release those that nothing depends on any more."""
        self._history.append(past)
        frames = sum(each.frames for each in self._history)
        while self._history and frames - self._history[0].frames >= self._reach:
            frames -= self._history.popleft().frames

    def _repeat(self, past: PastChunk, task: Callable[[Tensor], _Task]) -> dict[int, BaseException]:
        """Compute the last chunks on the devices that are left; return errors by their number."""
        self._recruit()
        chunks = [*self._history, past]
        self._start(first=chunks[0].first)
        share_cores([member.worker for member in self._in_order()])
        for chunk in chunks:
            for cache in self.caches[1:]:
                cache.first = chunk.first
            x = self._work.relief.attempt(chunk.whole)
            failures = self._each(task(x) if chunk is past else self._written(None, x))
            if failures:
                return failures
        return {}

    def _written(self, target: Any, x: Tensor) -> _Task:  # noqa: ANN401, a chunk or a tensor
        """Return the work of a device for `x` `[B, C, T, H, W]`; the result goes to `target`.

        None: it is dropped.
        """
        raise NotImplementedError

    def _each(self, task: _Task) -> dict[int, BaseException]:
        """Run a task on all devices; return errors by number of the device."""
        members = self._in_order()
        for member in members:
            member.worker.give(functools.partial(self._watched, member.number, task(member)))
        outcomes = {member.number: member.worker.outcome() for member in members}
        return {number: error for number, error in outcomes.items() if error is not None}

    def _watched(self, number: int, do: Callable[[], None]) -> None:
        """Run the task of a device; an error that ends the video also ends the other tasks."""
        try:
            do()
        except BaseException as error:
            if self._ending({number: error}) is not None:
                self._stopped.set()
            raise

    def _ending(self, failures: dict[int, BaseException]) -> BaseException | None:
        """Return the error that ends the video, or None: the caller's, a stop, the first's."""
        output = self._work.output
        caller = self._error_of_caller or (None if output is None else output.error)
        stops = (error for error in failures.values() if not isinstance(error, Exception))
        return caller or next(stops, None) or failures.get(self._planner.first)

    def _dismiss(self, failures: dict[int, BaseException]) -> None:
        """Go on without devices, or raise the error that ends the video."""
        ending = self._ending(failures)
        if ending is not None:
            failures.clear()
            try:
                raise ending
            finally:
                del ending  # whose traceback has this frame
        for number, error in failures.items():
            self._work.team.crew.fail(number, self._planner.devices[number], error)
            # The frames of a traceback hold what the device computed.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            member = self._members.pop(number, None)
            if member is not None:
                member.close()
        left = {n: each for n, each in self._planner.devices.items() if n not in failures}
        for device in {self._planner.devices[number] for number in failures} - set(left.values()):
            self._work.team.replicas.drop(device)
        self._planner = replace(self._planner, devices=left)
        self._bands = self._planner.recut(self._bands, self._work.team.crew.speeds(self._work.kind))
        self._pending = None
        self._balance.restart()

    def _recruit(self) -> None:
        """Create the members of the bands, and dismiss others and those that cannot take part."""
        while True:
            failures: dict[int, BaseException] = {}
            for band in self._bands.members:
                if band.number not in self._members:
                    try:
                        self._members[band.number] = self._member(band.number, band.device)
                    except Exception as error:
                        failures[band.number] = error
            if not failures:
                break
            self._dismiss(failures)
        for number in set(self._members) - set(self._bands.spans):
            self._members.pop(number).close()

    def _member(self, number: int, device: torch.device) -> Member:
        job, work = self._planner.job, self._work
        name, what = ("encoder", "an encode") if job.spec.encodes else ("decoder", "a decode")
        network = work.team.replicas.on(device, name, job.network, work.relief.attempt)
        relief = BandRelief(device, what, None if work.release is None else self._release)
        relief.stopped = self._stopped
        return Member(number, job, network, relief, work.kernels(device))

    def _release(self, device: torch.device) -> None:
        """Release memory of the caller on `device`, from one thread at a time."""
        release = self._work.release
        if release is None:
            return
        with self._releasing:
            try:
                release(device)
            except BaseException as error:
                self._error_of_caller = error
                raise

    def _start(self, *, first: bool | None = None) -> None:
        """Set the bands of all members, without the past of the video."""
        first = self.cache.first if first is None else first
        for band in self._bands.members:
            self._members[band.number].start(self._bands, band, first=first)

    def _look(self, shape: Hashable) -> None:
        """Plan other bands where memory ran out, or where devices have other speeds."""
        bands = self._bands
        what = "frame" if self._planner.job.spec.encodes else "latent"
        for member in self._in_order():
            if member.relief.done and member.relief.is_new:
                member.relief.report(f"{what} {self._done} on {member.device}")
                bands = self._planner.smaller(bands, member.number) or bands
        if bands is not self._bands:
            self._pending = bands
            return
        seconds = {member.number: member.seconds for member in self._in_order()}
        self._pending = self._balance.note(self._planner, bands, seconds, shape)

    def _adapt(self) -> None:
        """Continue in the bands that were planned after the last chunk."""
        bands, self._pending = self._pending, None
        if bands is not None:
            # Workers write to the tails later, which inference mode would not allow.
            with torch.inference_mode(False), torch.no_grad():
                self._change(bands)

    def _change(self, bands: Bands) -> None:
        """Continue in `bands`, with the tails of the bands before."""
        try:
            tails = self.tails()
        except Exception as error:
            # The bands serve on. A device that failed fails in the next chunk, where it is known.
            _logger.debug("Fast Video VAE: the bands stay, because no tails were moved: %s", error)
            return
        ready = {self._members[band.number]: band for band in self._bands.members}
        self._bands = bands
        self._recruit()
        while failures := self._move(tails, ready):
            self._dismiss(failures)
            self._recruit()
        for cache in self.caches:
            cache.first = self.cache.first
        self._shares_cores = True

    def _move(self, tails: Tails, ready: dict[Member, Band]) -> dict[int, BaseException]:
        """Set the bands of members that are not `ready` in them; return errors by their number."""
        failures: dict[int, BaseException] = {}
        for band in self._bands.members:
            member = self._members[band.number]
            if ready.get(member) != band:
                ready.pop(member, None)
                try:
                    member.start(self._bands, band, first=self.cache.first)
                    if tails:
                        member.take(tails)
                    ready[member] = band
                except Exception as error:
                    failures[band.number] = error
        return failures

    def _in_order(self) -> list[Member]:
        return [self._members[band.number] for band in self._bands.members]


class BandedDecode(BandedExecutor):
    """A decoder on several devices; each writes its part of the frames to the output."""

    def takes(self, frames: int, repeats: int) -> int | None:
        """Return None: a decode needs all `frames` for any `repeats`."""
        return None

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through; yield all of its frames together."""
        self._adapt()
        if self._work.output is None:
            raise ValueError("a decode has no output; expected one")
        chunk = self._work.output.chunk(x, first=self.cache.first)
        self._compute(x, x.shape[2], functools.partial(self._written, chunk))
        yield chunk.piece

    def _written(self, target: TiledChunk | None, x: Tensor) -> _Task:
        if target is not None:
            target.restart()
        return lambda member: member.decode(x, target)


class BandedEncode(BandedExecutor):
    """An encoder on several devices; the first one joins the bands, and runs the other layers."""

    _taken: int | None = None  # frames that the layers on whole frames need

    def takes(self, frames: int, repeats: int) -> int | None:
        """Announce a chunk of `frames` with `repeats` to all devices, then to the other layers."""
        self._adapt()
        self._frames = frames
        wanted: int | None = None
        for member in self._in_order():
            if isinstance(member.executor, TiledEncode):
                wanted = member.executor.takes_tiles(frames, repeats)
        behind = self._in_order()[0].executor.behind
        self._taken = super().takes(behind.frames, behind.frames - behind.fresh + 1)
        return wanted

    def advance(self, x: Tensor) -> Iterator[Tensor]:
        """Push one chunk `x` `[B, C, T, H, W]` through, on all devices first."""
        self._adapt()
        frames, self._frames = self._frames or x.shape[2], None
        whole = self._work.relief.attempt(functools.partial(self._joined, x, frames))
        self._compute(x, frames, functools.partial(self._written, whole))
        yield from super().advance(whole[:, :, : self._taken])

    def _joined(self, x: Tensor, frames: int) -> Tensor:
        """Return memory for the results of all bands for a chunk of `frames`."""
        job = self._planner.job
        channels, _, height, width = job.spec.shapes(job.start, single_frame=True)[self._bands.cut]
        if not self.cache.first:
            for chain in self._tiled:
                for layer in chain:
                    for _, stride in causal_taps(layer):
                        frames //= stride
        return new_video(x, (x.shape[0], channels, frames, height, width))

    def _written(self, target: Tensor | None, x: Tensor) -> _Task:
        return lambda member: member.encode(x, target)


def _reach_of(job: StreamJob, bands: Bands) -> int:
    """Return the frames or latents before a chunk that `bands` depend on."""
    if job.single_frame:
        return 0
    if job.spec.encodes:
        return frames_before(job.network.layers()[: bands.cut])
    return latents_before(job.network)
