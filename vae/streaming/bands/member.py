"""A device of one video: its thread, its memory, and the executor of its band."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ....kernels import seeing, synchronize
from ...layers.temporal_cache import TemporalCache
from ...layers.workspace import Workspace, canonical
from ...planning.bands import Band, Bands
from ...planning.candidates import cut_frames
from ..cache_offload import Parking
from ..output import TiledChunk
from ..precision import full_float32
from ..tiled_executor import TiledDecode, TiledEncode
from .crew import BandedWork
from .worker import Worker


class _Memory(Workspace):
    """The memory of one device, which ends its work between two layers when the video is closed."""

    def __init__(self, stopped: threading.Event) -> None:
        super().__init__()
        self._stopped = stopped

    def scratch(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return memory for the input of a convolution, or raise an `InterruptedError`."""
        if self._stopped.is_set():
            raise InterruptedError("the video is closed")
        return super().scratch(shape, like)


class Member:
    """One device of one video, without the past of the video; `stopped`: the video is closed."""

    executor: TiledDecode | TiledEncode

    def __init__(
        self, work: BandedWork, bands: Bands, band: Band, stopped: threading.Event, *, first: bool
    ) -> None:
        self.number, self.device, job = band.number, band.device, work.job
        self.worker = Worker(self.device, f"fast-video-vae-{self.number}-{self.device}")
        self._seen, self._full = work.kernels(self.device), job.dtype == torch.float32
        memory = _Memory(stopped)

        def new_cache() -> TemporalCache:
            cache = TemporalCache(
                single_frame=job.single_frame, band_bytes=band.part_bytes, workspace=memory
            )
            cache.first = first
            return cache

        name = "encoder" if job.spec.encodes else "decoder"
        network = work.replicas.on(self.device, name, job.network)
        whole, tiles, size = cut_frames(job, network.chains(), bands.cut, band.tiles)
        self._run: Callable[[Tensor, Any], object]
        if job.spec.encodes:
            # The first device runs the layers on whole frames, elsewhere.
            encode = TiledEncode([[]], tiles, size, new_cache, band.part_bytes)
            self.executor, self._run = encode, encode.join
        else:
            decode = TiledDecode(whole, tiles, size, new_cache, band.part_bytes)
            self.executor, self._run = decode, lambda x, chunk: decode.fill(x, lambda: chunk)
        if band.parked:
            self.executor.parking = Parking(self.device)

    def task(self, x: Tensor, target: TiledChunk | Tensor) -> Callable[[], None]:
        """Return the task to run the layers on a copy of `x` `[B, C, T, H, W]` on this device.

        The result goes to its place in `target`, the frames or `[B, C, T, H, W]` of all bands.
        """
        ready: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(x.device))
        elif x.device != self.device:
            synchronize(x.device)

        def task() -> None:
            with seeing(self._seen), full_float32(self.device) if self._full else nullcontext():
                if ready is not None:
                    # Copies between devices use the streams of both.
                    for device in {x.device, self.device}:
                        if device.type == "cuda":
                            torch.cuda.current_stream(device).wait_event(ready)
                try:
                    self._run(self._here(x), target)
                finally:
                    # Errors of the device appear here, also if the writer has failed because of
                    # them. Then its memory can be used by other threads.
                    self._wait(self.device)
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
