"""The band of a device of this process in one video."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels import Snapshot, on_device, searches_shapes, seeing, synchronize
from ...layers.inputs.coding import Coding
from ...layers.temporal_cache import TemporalCache, Workspace, canonical
from ...models.replicas import Replicas
from ...planning.bands import Band
from ...planning.job import StreamJob
from ..precision import layer_modes
from ..tiled_executor import Target, tiled_executor

# Frames and repeats of a chunk, for `Executor.takes`; None: it has no static end.
Announced = tuple[int, int] | None


@dataclass(frozen=True)
class Work:
    """What the devices of a video have in common."""

    job: StreamJob  # on the first device
    replicas: Replicas  # the copies of its network
    kernels: Callable[[torch.device], Snapshot]  # in addition to the library
    begins: bool  # the first frame is the start of the video


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
    """The band of one device in one video, without the past of the video."""

    def __init__(self, work: Work, band: Band, stopped: threading.Event) -> None:
        self.device = band.device
        name = "encoder" if work.job.encodes else "decoder"
        network = work.replicas.on(band.device, name, work.job.network)
        job = replace(work.job, network=network, device=band.device)
        coding = Coding(job.coded, band.device) if job.coded else None
        memory, self._seen = _Memory(stopped), work.kernels(band.device)
        new_cache = functools.partial(
            TemporalCache,
            single_frame=job.single_frame,
            band_bytes=band.part_bytes,
            workspace=memory,
            coding=coding,
            route_token=network.route_token(self._seen, band.device),
            same_shapes=searches_shapes(band.device),
            first=work.begins,
        )
        self.executor = tiled_executor(
            job, band.tiles, new_cache, band.part_bytes, parked=band.parked
        )
        self.caches = self.executor.caches
        self._full = job.dtype == torch.float32

    def stop(self) -> None:
        """End the work, which the event does."""

    def task(self, x: Tensor, target: Target, announced: Announced) -> Callable[[], None]:
        """Return the task to run the layers on a copy of `x` `[B, C, T, H, W]`, into `target`.

        The chunk was `announced` to the first device, as to an `Executor`.
        """
        ready: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(x.device))
        elif x.device != self.device:
            synchronize(x.device)

        def task() -> None:
            with (
                on_device(self.device),
                layer_modes(self.device, full=self._full),
                seeing(self._seen),
            ):
                if ready is not None:
                    # Copies between devices use the streams of both.
                    for device in {x.device, self.device}:
                        if device.type == "cuda":
                            torch.cuda.current_stream(device).wait_event(ready)
                try:
                    if announced is not None:
                        self.executor.takes(*announced)
                    self.executor.run(self._here(x), target)
                finally:
                    # Errors of the device appear here, also if the writer has failed because of
                    # them. Then its memory can be used by other threads.
                    for device in {x.device, self.device}:
                        synchronize(device)

        return task

    def _here(self, x: Tensor) -> Tensor:
        """Return `x` `[B, C, T, H, W]` on this device, channels-last."""
        if x.device == self.device:
            return x
        # A copy to the host that does not block could be read before it is complete.
        moved = x.to(self.device, non_blocking=self.device.type != "cpu")
        return canonical(moved.contiguous(memory_format=torch.channels_last_3d))
