"""One run of a video under one setting: a plan, and its chunks through an executor."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels import Proofs, Snapshot, proving, searches_shapes, seeing
from ..layers.conv import Conv, drop_stale_forms
from ..layers.frame_runs import fitted
from ..layers.inputs.coding import Coding
from ..layers.temporal_cache import TemporalCache, Workspace, canonical
from ..models.base import Network
from ..models.config import VAEConfig
from ..models.executor import Executor, rechunk
from ..models.static_frames import Changes
from ..planning.device_memory import free_bytes
from ..planning.job import StreamJob, job_of
from ..planning.plan import Plan, check_plan, make_plan
from ..validation import warn_dropped
from . import cuda_graph
from .bands.banded_executor import BandedExecutor
from .bands.member import Work
from .bands.team import Team
from .cache_offload import Parking
from .options import StreamOptions
from .output import Output, Sink
from .precision import layer_modes
from .settings import Setting
from .tiled_executor import TiledDecode, tiled_executor
from .upload import Upload

# Kinds of convolutions that a video may prove; it has about ten.
_PROOFS = 16

# Most latents that are computed in vain, which takes less time than a search; see
# `searches_shapes`.
_SEARCHED = 3


@dataclass(frozen=True)
class VideoJob:
    """What a video needs of its VAE under every setting."""

    network: Network  # the encoder or the decoder
    config: VAEConfig
    options: StreamOptions  # with limit and chunk filled in
    encodes: bool
    video: Tensor | None  # the whole video; None: it arrives in pieces
    # Applied to a chunk `[B, C, T, H, W]` on the device, before the first layer.
    enter: Callable[[Tensor], Tensor]
    # What may run in addition to the library, by device, dtype and names in int8.
    kernels: Callable[[torch.device, torch.dtype, frozenset[str]], Snapshot]
    proved: Callable[[Setting], Setting]  # without what its device computes wrongly
    team: Team
    to_range: Callable[[Tensor], Tensor] | None = None  # of float pixels of an encode, to [-1, 1]
    graphs: bool = False  # repeated chunks are captured as CUDA graphs
    skips: bool = False  # static frames are skipped

    @property
    def task(self) -> str:
        """The work in words."""
        return "an encode" if self.encodes else "a decode"

    @property
    def is_single_frame(self) -> bool:
        """Whether the video is known to have one frame."""
        if self.video is None:
            return False
        frames = self.video.shape[2]
        return (self.config.latent_frames(frames) if self.encodes else frames) == 1

    @property
    def group(self) -> int:
        """Frames, or latents, of the input per latent."""
        return self.config.temporal_compression if self.encodes else 1

    @contextlib.contextmanager
    def left(self, setting: Setting) -> Iterator[None]:
        """Free the copy of the network after the block, if the VAE is on another device."""
        try:
            yield
        finally:
            if setting.moved:
                self.team.replicas.drop(setting.device)


class VideoSession:
    """One run of a video under a setting, whose results `sink` takes.

    `plan` is known from the first result on, and `planned` is the stream that it is for.
    """

    def __init__(
        self, job: VideoJob, setting: Setting, sink: Sink, coding: Coding | None = None
    ) -> None:
        self.plan: Plan | None = setting.plan
        self.planned: StreamJob | None = None
        self._job, self._setting, self._sink, self._coding = job, setting, sink, coding
        self._device, self._pictures = setting.device, job.config.is_of_pictures
        self._upload = Upload(setting.device, setting.dtype, job.to_range) if job.encodes else None
        self._workspace, self._changes = Workspace(), Changes()
        self._seen = self._kernels(setting.device)
        self._proofs = Proofs(0, 0)
        self._graphs = job.graphs and coding is None  # the counts of codes are not captured
        # Another shape costs a search of the library: no shorter steps.
        self._searches = searches_shapes(setting.device)
        self._skips = job.skips and not self._searches
        self._recording: cuda_graph.Recording | None = None
        self._parking: Parking | None = None  # while tails are on the host
        self._caches: list[TemporalCache] = []  # that may be there
        self._last: tuple[torch.Size, bool] | None = None  # the chunk before, for a recording

    def run(
        self, source: Iterator[Tensor], *, begins: bool = True
    ) -> Generator[Tensor, None, None]:
        """Run the checked pieces `[B, C, t, H, W]` of a video; yield those of the sink.

        Between results the caller's modes are active. The first frame `begins` the video, or frames
        before it are unknown.
        """
        first = next(source, None)
        if first is None:
            name = "frames" if self._job.encodes else "latents"
            raise ValueError(f"the video has no {name}; expected at least one")
        if self._job.video is not None and first.device.type != "cpu":
            self._changes = Changes(first)
        executor, plan = self._begin(first, begins=begins)
        source = itertools.chain([first], source)
        del first  # the first piece is not kept
        pieces = rechunk(source, self._step_of(plan), begins=begins)
        if plan.tiles is None and plan.bands is None:
            self._caches = executor.caches
        try:
            for chunk in self._chunks(pieces, executor, plan):
                results: Iterator[Tensor] | None = None
                while True:
                    with self._modes():
                        results = self._step(chunk, executor) if results is None else results
                        piece = next(results, None)
                        piece = None if piece is None else executor.finish(piece)
                    if piece is None:
                        break
                    yield piece
                    del piece
                for cache in executor.caches:
                    cache.first = self._pictures
            self.check()
        finally:
            self._proofs.close()
            self._recording, self._caches = None, []
            executor.close()

    def check(self) -> None:
        """Raise the `ValueError` of pixels that are not finite, for which the device is asked."""
        if self._upload is not None:
            self._upload.check()

    def park(self) -> None:
        """Move the tails of whole frames on one device to the host until the next step."""
        if self._parking is not None or not self._caches:
            return
        self._recording = self._last = None  # which replays with the tails in their places
        self._workspace.clear()
        self._parking = Parking(self._device)
        with self._modes():
            for cache in self._caches:
                self._parking.park(cache)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """Set the modes in which layers run within the block."""
        with (
            layer_modes(self._device, full=self._setting.dtype == torch.float32),
            seeing(self._seen),
            proving(self._proofs),
        ):
            yield

    def _begin(self, first: Tensor, *, begins: bool) -> tuple[Executor, Plan]:
        """Make the plan for the size of the first piece; return its executor, and the plan."""
        job, setting, device = self._job, self._setting, self._device
        limit = job.options.limit_bytes
        planned = self._planned(first)
        self.planned, plan = planned, setting.plan
        if setting.is_open:
            plan = job.team.plan(planned, job.options)
        if plan is None:
            plan = make_plan(planned, limit, chunk=job.options.chunk, tile=job.options.tile)
        self.plan = plan
        check_plan(planned, plan)
        if plan.bands is None:
            # A picture proves one kind at a time, a video all of them.
            room = (free_bytes(device) if limit is None else limit) - plan.peak_bytes
            self._proofs = Proofs(room, 1 if job.is_single_frame else _PROOFS)
        modules = planned.network.modules
        kept = planned.network.kept
        drop_stale_forms(kept.of("convs", lambda: [m for m in modules() if isinstance(m, Conv)]))

        if plan.bands is None:
            new_cache = functools.partial(
                TemporalCache,
                single_frame=planned.single_frame,
                band_bytes=plan.part_bytes,
                workspace=self._workspace,
                coding=self._coding,
                route_token=planned.network.route_token(self._seen, device),
                same_shapes=self._searches,
                first=begins,
            )
            return _executor_of(planned, plan, new_cache, self._sink), plan

        work = Work(planned, job.team.replicas, self._kernels, begins)
        output = self._sink if isinstance(self._sink, Output) else None
        executor = BandedExecutor(work, plan.bands, job.team.members(setting.device), output)
        if output is None:
            executor.finish = self._sink.write
        return executor, plan

    def _kernels(self, device: torch.device) -> Snapshot:
        """Return what the ops of the run use on a device."""
        setting = self._setting
        found = self._job.kernels(device, setting.dtype, setting.coded)
        return replace(found, fallback=found.fallback | setting.fallback)

    def _planned(self, first: Tensor) -> StreamJob:
        """Return the stream to plan, of the size of the first piece `[B, C, t, H, W]`."""
        job, setting = self._job, self._setting
        compression = job.config.spatial_compression if job.encodes else 1
        size = first.shape[3] // compression, first.shape[4] // compression
        place, name = setting.device, "encoder" if job.encodes else "decoder"
        return job_of(
            job.team.replicas.on(place, name, job.network, proves=setting.distrusts),
            job.config,
            (first.shape[0], *size),
            setting.dtype,
            place,
            single_frame=job.is_single_frame,
            coded=setting.coded,
        )

    def _step_of(self, plan: Plan) -> int | None:
        """Return the frames, or latents, of a step; None: all."""
        if self._pictures:
            return 1
        return None if plan.chunk == -1 else plan.chunk * self._job.group

    def _chunks(self, runs: Iterator[Tensor], executor: Executor, plan: Plan) -> Iterator[Tensor]:
        """Cut what is no whole latent, and fill the last step up if another shape costs more."""
        size, group, dropped = self._step_of(plan), self._job.group, 0
        for run in runs:
            if not executor.cache.first:
                dropped = run.shape[2] % group
                run = run[:, :, : run.shape[2] - dropped]
                latents, more = run.shape[2] // group, (size or 0) - run.shape[2]
                # Frames only see those before them. The results of the copies are dropped.
                if latents and 0 < more <= _SEARCHED * group and self._searches:
                    self._sink.end_after(latents)
                    run = fitted(run, run.shape[2] + more)
            if run.shape[2]:
                yield run
        if dropped:
            warn_dropped(dropped)

    def _step(self, chunk: Tensor, executor: Executor) -> Iterator[Tensor]:
        """Return the results of a chunk, replayed if an equal chunk was captured."""
        if self._parking is not None:
            for cache in self._caches:
                self._parking.wait(cache)
            self._parking = None
        if self._skips:
            wanted = executor.takes(chunk.shape[2], self._changes.repeats(chunk))
            if wanted is not None:  # its last frames are static
                self._last = None
                return executor.advance(self._input(chunk[:, :, :wanted]))
        x = self._input(chunk)
        before, self._last = self._last, (chunk.shape, executor.cache.first)
        if before != self._last:
            self._recording = None
        elif self._graphs and executor.records and cuda_graph.takes(self._device):
            try:
                if self._recording is None:
                    self._recording = cuda_graph.Recording(executor.advance, x)
                return self._recording.replay(x)
            except RuntimeError as error:
                self._graphs = False
                cuda_graph.complain(error)
        return executor.advance(x)

    def _input(self, chunk: Tensor) -> Tensor:
        """Return a chunk as the first layer takes it."""
        if self._upload is not None:
            x = self._upload(chunk)
        else:
            x = chunk.to(self._device, self._setting.dtype)
            x = x.contiguous(memory_format=torch.channels_last_3d)
        return canonical(self._job.enter(canonical(x)))


def _executor_of(
    job: StreamJob, plan: Plan, new_cache: Callable[[], TemporalCache], sink: Sink
) -> Executor:
    """Return the executor of a plan for one device, whose results `sink` takes."""
    if plan.tiles is None:
        executor = Executor(job.network.chains(), new_cache(), plan.part_bytes)
        executor.finish = sink.write
        return executor
    tiled = tiled_executor(job, plan.tiles, new_cache, plan.part_bytes, parked=plan.parked)
    if isinstance(tiled, TiledDecode) and isinstance(sink, Output):
        tiled.output = sink
    else:
        tiled.finish = sink.write
    return tiled
