"""One video through the network: its chunks, its plan, and a smaller plan when memory runs out."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import (
    Proofs,
    Snapshot,
    is_out_of_memory,
    proving,
    searches_shapes,
    seeing,
)
from ..layers.conv import Conv, drop_stale_forms
from ..layers.frame_runs import fitted
from ..layers.inputs.coding import Coding
from ..layers.lines import FrameShard
from ..layers.oom import Relief
from ..layers.temporal_cache import TemporalCache
from ..layers.workspace import Workspace, canonical
from ..models.base import Network
from ..models.config import VAEConfig
from ..planning.device_memory import free_bytes
from ..planning.job import job_of
from ..planning.plan import Plan, check_plan, make_plan, smaller_plan
from ..validation import warn_dropped
from . import cuda_graph
from .bands.crew import BandedWork, Team
from .executor import Executor, rechunk
from .executors import make_banded, make_executor
from .options import StreamOptions
from .output import Output
from .precision import eager, layer_modes
from .static_frames import Changes
from .upload import Upload

if TYPE_CHECKING:
    from ..sharding.shard import ShardGroup

# Kinds of convolutions that a video may prove; it has about ten.
_PROOFS = 16

# Seconds of a search for one new shape, at least; see `searches_shapes`.
_SEARCH_S = 7.6


@dataclass
class VideoSession:
    """Runs one video: plans for its size, then pushes its chunks through an executor."""

    network: Network
    config: VAEConfig
    options: StreamOptions  # with limit and chunk filled in
    dtype: torch.dtype  # of the computation
    enter: Callable[[Tensor], Tensor]  # of a chunk `[B, C, T, H, W]`, before the first layer
    to_range: Callable[[Tensor], Tensor] | None  # of the pixels of an encode, to [-1, 1]
    leave: Callable[[Tensor], Tensor] | Output  # for the output of an encoder; or a destination
    relief: Relief
    single_frame: bool
    begins: bool  # otherwise the frames before the first one are unknown
    graphs: bool
    skips: bool  # static frames
    kernels: Callable[[torch.device], Snapshot]  # in addition to the library
    shards: "ShardGroup | None" = None
    team: Team | None = None
    known: bool = False  # the whole video is at hand
    coding: Coding | None = None

    def __post_init__(self) -> None:
        self._device = self.relief.device
        # The operations between ranks and the counts of codes are not captured.
        self.graphs = self.graphs and self.shards is None and self.coding is None
        # Shorter steps would be searched for.
        self.skips = self.skips and not searches_shapes(self._device)
        self._encodes = not isinstance(self.leave, Output)
        # Frames per latent at the input.
        self._group = self.config.temporal_compression if self._encodes else 1
        self._pictures = self.config.is_of_pictures  # every frame is a first frame
        self._upload = Upload(self._device, self.dtype, self.to_range) if self._encodes else None
        self._workspace, self._changes = Workspace(), Changes()
        self._seen, self._proofs = self.kernels(self._device), Proofs(0, 0)
        self._chunk: Tensor | None = None
        self._results: Iterator[Tensor] | None = None
        self._is_static = False
        self._last: tuple[torch.Size, bool] | None = None
        self._repeats = 0  # equal chunks before this one
        self._left: int | None = None  # latents of a last chunk that is filled up
        self._recording: cuda_graph.Recording | None = None
        self._shard: FrameShard | None = None

    @property
    def plan(self) -> Plan:
        """The current plan; there is one from the first result on."""
        return self._plan

    def run(self, source: Iterator[Tensor]) -> Generator[Tensor, None, None]:
        """Run the checked pieces of the video; between results the caller's modes are active."""
        source = self._planned(source)
        relief, done = self.relief, 0
        relief.frees = self._workspace.release
        relief.parks = lambda: self._executor.park()
        self._workspace.relief = relief
        try:
            for chunk in self._chunks(source):
                self._begin(chunk)
                while (piece := self._next()) is not None:
                    if self._left is not None:
                        piece = piece[:, :, : self._left]
                        self._left -= piece.shape[2]
                    yield piece
                done += chunk.shape[2]
                if self._executor.cache.first != self._pictures:
                    for cache in self._executor.caches:
                        cache.first = self._pictures
                is_short = bool(relief.done and relief.is_new)
                if is_short:
                    relief.report(f"{'frame' if self._encodes else 'latent'} {done}")
                if self._is_true_of_any(is_short):
                    self._lower()
            if self._upload is not None:
                self._upload.check(None if self.shards is None else self.shards.most)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise relief.exhausted(error) from None
        finally:
            # Break the reference cycles so that the caches are freed now.
            self._workspace.relief = None
            relief.forget()
            self._proofs.close()
            self._recording = self._results = None
            self._executor.close()

    @eager
    def _planned(self, source: Iterator[Tensor]) -> Iterator[Tensor]:
        """Make the plan for the size of the first piece."""
        first = next(source, None)
        if first is None:
            name = "frames" if self._encodes else "latents"
            raise ValueError(f"the video has no {name}; expected at least one")
        compression = self.config.spatial_compression if self._encodes else 1
        size = first.shape[3] // compression, first.shape[4] // compression
        ranks = 1
        if self.shards is not None:
            self._shard = self.shards.split(*size, self.relief.finish)
            ranks = self.shards.size
            size = self._shard.largest_part(size)
        if self.known and first.device.type != "cpu":
            self._changes = Changes(first)
        model = self.network, self.config, (first.shape[0], *size), self.dtype, self._device
        coded = self.coding.names if self.coding else frozenset()
        self._job = job_of(*model, single_frame=self.single_frame, ranks=ranks, coded=coded)
        banded = None if self.team is None else self.team.plan(self._job, self.options)
        limit = self.options.limit_bytes
        if self.shards is not None:
            limit = self.shards.limit_of(self._job, limit)
        options = {"chunk": self.options.chunk, "tile": self.options.tile}
        self._plan, self._planner = banded or (make_plan(self._job, limit, **options), None)
        check_plan(self._job, self._plan)
        if self.team is None or self._planner is None:
            # A picture proves one kind at a time, a video all of them.
            most = 1 if self.single_frame else _PROOFS
            room = (free_bytes(self._device) if limit is None else limit) - self._plan.peak_bytes
            self._proofs = Proofs(room, most)
        if self.shards is not None:
            options = {"begins": self.begins, "skips_static": self.skips}
            self.shards.check_plan(self._job, self._plan, options, self.relief.finish)
        modules = self.network.modules
        convs = self.network.kept.of("convs", lambda: [m for m in modules() if isinstance(m, Conv)])
        drop_stale_forms(convs, self.relief.finish)
        self._executor = self._executor_of(self._plan)
        return itertools.chain([first], source)

    def _chunks(self, source: Iterator[Tensor]) -> Iterator[Tensor]:
        """Cut the pieces into steps of the plan, which can change to a smaller one meanwhile."""
        chunk, group = self._plan.chunk, self._group
        size = 1 if self._pictures else None if chunk == -1 else chunk * group
        dropped = 0
        for whole in rechunk(source, size, begins=self.begins, attempt=self.relief.attempt):
            rest = whole
            if not self._executor.cache.first and whole.shape[2] % group:
                dropped = whole.shape[2] % group
                rest = whole[:, :, : whole.shape[2] - dropped]
            ends = not self._executor.cache.first and size is not None and whole.shape[2] < size
            while rest.shape[2]:
                chunk = self._plan.chunk
                length = rest.shape[2] if chunk == -1 else chunk * group
                run, rest = rest[:, :, :length], rest[:, :, length:]
                yield self._filled(run, length) if ends and run.shape[2] < length else run
        if dropped:
            warn_dropped(dropped)

    def _filled(self, run: Tensor, length: int) -> Tensor:
        """Repeat the last frame of the last chunk up to `length` if another shape costs more."""
        # Frames only see those before them. The results of the copies are dropped.
        frames, group = run.shape[2], self._group
        added_s = (length - frames) // group * self._plan.latent_s
        if not searches_shapes(self._device) or added_s > _SEARCH_S:
            return run
        if isinstance(self.leave, Output):
            self.leave.end_after(frames * self.config.temporal_compression)
        else:
            self._left = frames // group
        return self.relief.attempt(lambda: fitted(run, length))

    @eager
    def _begin(self, chunk: Tensor) -> None:
        """Inspect the next chunk: of the shape of the last one, or static."""
        like = chunk.shape, self._executor.cache.first
        self._repeats = self._repeats + 1 if like == self._last else 0
        if self._repeats == 0:
            self._recording = None
        self._last = like
        if self.skips:
            repeats = self.relief.attempt(lambda: self._changes.repeats(chunk))
            wanted = self._executor.takes(chunk.shape[2], repeats)
            self._is_static = wanted is not None
            if self._is_static:
                chunk = chunk[:, :, :wanted]
        self._chunk = chunk if self._shard is None else self._shard.cut(chunk)

    @eager
    def _next(self) -> Tensor | None:
        """Compute and return the next result; None after the last."""
        with contextlib.ExitStack() as modes:
            modes.enter_context(layer_modes(self._device, full=self.dtype == torch.float32))
            modes.enter_context(seeing(self._seen))
            modes.enter_context(proving(self._proofs))
            if self._results is None:
                again = functools.partial(self._input, self._chunk)
                self._executor.again = again
                self._results = iter(self._steps(self.relief.attempt(again)))
            result = next(self._results, None)
            if result is None:
                self._results = None
                return None
            return self._executor.finish(result)

    def _input(self, chunk: Tensor | None) -> Tensor:
        if chunk is None:
            raise RuntimeError("no chunk was set; expected one")
        if self._upload is not None:
            x = self._upload(chunk)
        else:
            x = chunk.to(self._device, self.dtype).contiguous(memory_format=torch.channels_last_3d)
        return canonical(self.enter(canonical(x)))

    def _steps(self, x: Tensor) -> Iterable[Tensor]:
        """Return the results of the chunk, replayed if an equal chunk was captured."""
        executor = self._executor
        repeats = self._repeats and executor.records and not self._is_static
        if self.graphs and repeats and cuda_graph.takes(self._device):
            try:
                if self._recording is None:
                    self._recording = cuda_graph.Recording(executor.advance, x)
                return self._recording.replay(x)
            except RuntimeError as error:
                self.graphs = False
                cuda_graph.complain(error)
        return executor.advance(x)

    def _is_true_of_any(self, fact: bool) -> bool:
        """Return whether a fact is true of any rank of this video."""
        if self.shards is None:
            return fact
        return bool(self.shards.most("facts", fact, self.relief.attempt))

    @eager
    def _lower(self) -> None:
        """Continue with the next smaller plan, if one exists and memory allows the change."""
        smaller = smaller_plan(self._job, self._plan)
        if smaller is None:
            return

        def changed() -> Executor:
            executor = self._executor_of(smaller)
            # Single pictures have no tails.
            if not self._pictures:
                executor.take(self._executor.tails())
                # SeedVR2's layers note whether their first frame was the last one; it is never
                # tiled.
                executor.cache.after_first |= self._executor.cache.after_first
            return executor

        try:
            # As in the steps: tails created in inference mode cannot be written to later.
            with torch.inference_mode(False), torch.no_grad():
                executor = self.relief.attempt(changed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            executor = None
        if self._is_true_of_any(executor is None) or executor is None:
            return
        self._executor = executor
        self._plan, self._recording, self._repeats, self._last = smaller, None, 0, None

    def _executor_of(self, plan: Plan) -> Executor:
        def new_cache() -> TemporalCache:
            cache = TemporalCache(
                single_frame=self._job.single_frame,
                band_bytes=plan.part_bytes,
                workspace=self._workspace,
                shard=self._shard,
                coding=self.coding,
            )
            cache.first = self.begins
            return cache

        if self.team is None or self._planner is None or plan.bands is None:
            return make_executor(self._job, plan, new_cache, self.leave)
        work = BandedWork(
            self._planner,
            self.team,
            self.relief,
            self.options.release,
            self.known,
            self.leave if isinstance(self.leave, Output) else None,
            self.kernels,
        )
        return make_banded(work, plan.bands, new_cache(), self.leave)
