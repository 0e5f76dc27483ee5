"""A device of one video: its thread, its memory, and the executor of its band."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from ....kernels import Snapshot, seeing, synchronize
from ...layers.oom import Relief
from ...layers.temporal_cache import TemporalCache
from ...layers.workspace import Workspace, canonical
from ...models.base import Network, unwrapped
from ...planning.bands import Band, Bands, cut_band
from ...planning.job import StreamJob
from ..cache_offload import Parking
from ..executor import Tails
from ..output import TiledChunk
from ..precision import full_float32
from ..tiled_executor import TiledDecode, TiledEncode
from .worker import Worker

_Result = TypeVar("_Result")


class BandRelief(Relief):
    """Frees memory of one device when it runs out, and ends its work when the video is closed."""

    stopped: threading.Event  # the video is closed

    def attempt(self, do: Callable[[], _Result]) -> _Result:
        """Run a step as `Relief.attempt`, or raise an `InterruptedError`."""
        if self.stopped.is_set():
            raise InterruptedError("the video is closed")
        return super().attempt(do)


class Member:
    """One device of one video: its band, and its network."""

    band: Band
    executor: TiledDecode | TiledEncode

    def __init__(
        self,
        number: int,
        job: StreamJob,
        network: Network,
        relief: BandRelief,
        seen: Snapshot,
    ) -> None:
        self.number, self.device, self.relief = number, relief.device, relief
        self.worker = Worker(self.device, f"fast-video-vae-{number}-{self.device}")
        self.seconds = 0.0
        self._job, self._network = job, network
        self._workspace = Workspace()
        self._workspace.relief = relief
        relief.frees, relief.parks = self._workspace.release, self._park
        self._seen = seen
        pairs = zip(unwrapped(job.network).modules(), unwrapped(network).modules(), strict=True)
        self._twins = dict(pairs)

    @property
    def caches(self) -> list[TemporalCache]:
        """The caches of the whole frames and of the tiles."""
        return self.executor.caches

    def start(self, bands: Bands, band: Band, *, first: bool) -> None:
        """Set the band, without the past of the video."""
        self.band = band
        whole, tiles, size = cut_band(self._job, bands, band, self._network.chains())

        def new_cache() -> TemporalCache:
            cache = TemporalCache(
                single_frame=self._job.single_frame,
                band_bytes=band.part_bytes,
                workspace=self._workspace,
            )
            cache.first = first
            return cache

        if self._job.spec.encodes:
            # The first device runs the layers on whole frames, elsewhere.
            self.executor = TiledEncode([[]], tiles, size, new_cache, band.part_bytes)
        else:
            self.executor = TiledDecode(whole, tiles, size, new_cache, band.part_bytes)
        if band.parked:
            self.executor.parking = Parking(self.device)

    def tail_of(self, conv: nn.Module, cache: TemporalCache) -> Tensor:
        """Return the tail `[B, C, context, H, W]` in `cache` of `conv` of the first's network."""
        return cache.tails()[self._twins[conv]]

    def take(self, tails: Tails) -> None:
        """Continue with `tails` `[B, C, context, H, W]` of whole frames, by the first's `conv`."""
        own = {self._twins[conv]: tail for conv, tail in tails.items()}
        self.relief.attempt(functools.partial(self.executor.take, own))
        # On the host, until a layer needs them: its device may be short of memory. Devices must not
        # share tails, which are written to.
        for cache in self.caches:
            self.relief.attempt(functools.partial(cache.exchange, lambda _, tail: tail.clone()))

    def decode(self, x: Tensor, target: TiledChunk | None) -> Callable[[], None]:
        """Return the task to decode `x` `[B, C, T, H, W]`; no `target`: the frames are dropped."""
        executor = self.executor
        if not isinstance(executor, TiledDecode):
            raise TypeError("an encoder has no frames to write; expected a decoder")
        attempt = self.relief.attempt

        def run(y: Tensor) -> None:
            executor.fill(y, lambda: target, attempt)
            if target is not None:
                # An error of a copy appears in its chunk, which the other devices can repeat.
                target.settle()

        return self._task(x, run)

    def encode(self, x: Tensor, whole: Tensor | None) -> Callable[[], None]:
        """Return the task to run the tiled layers on `x` `[B, C, T, H, W]`, into `whole`."""
        executor = self.executor
        if not isinstance(executor, TiledEncode):
            raise TypeError("a decoder has no latents to join; expected an encoder")
        return self._task(x, lambda y: executor.join(y, whole))

    def close(self) -> None:
        """End the thread, and break the reference cycles so that all memory is freed."""
        try:
            self.worker.end()
        finally:
            self._workspace.relief = None
            self.relief.forget()

    def _task(self, x: Tensor, run: Callable[[Tensor], object]) -> Callable[[], None]:
        """Return a task that runs `run` on a copy of `x` `[B, C, T, H, W]` on this device."""
        ready: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(x.device))
        elif x.device != self.device:
            synchronize(x.device)

        def task() -> None:
            full = self._job.dtype == torch.float32
            with seeing(self._seen), full_float32(self.device) if full else nullcontext():
                if ready is not None:
                    # Copies between devices use the streams of both.
                    for device in {x.device, self.device}:
                        if device.type == "cuda":
                            torch.cuda.current_stream(device).wait_event(ready)
                start = time.perf_counter()
                run(self.relief.attempt(functools.partial(self._here, x)))
                # Errors of the device appear here, and its memory can be used by other threads.
                self._wait(self.device)
                self.seconds = time.perf_counter() - start
                if x.device != self.device:
                    self._wait(x.device)

        return task

    def _here(self, x: Tensor) -> Tensor:
        """Return `x` `[B, C, T, H, W]` on this device, channels-last."""
        if x.device == self.device:
            return x
        # A copy to the host that does not block could be read before it is complete.
        moved = x.to(self.device, non_blocking=self.device.type != "cpu")
        return canonical(moved.contiguous(memory_format=torch.channels_last_3d))

    def _wait(self, device: torch.device) -> None:
        """Wait for the work that this thread has queued on `device`."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        else:
            synchronize(device)

    def _park(self) -> bool:
        return self.executor.park()
