"""One video on its way through the network: its chunks, and its route, also a smaller one."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import is_out_of_memory
from ..layers.causal_layer import CausalLayer
from ..layers.oom import Relief
from ..layers.temporal_cache import TemporalCache
from ..layers.workspace import Workspace
from ..planning.plan import Plan, Work, cut_tiles, smaller_plan
from .cache_offload import Parking
from .chunk_runner import Steps
from .executor import Route, TiledDecode, TiledEncode, WholeFrames
from .lanes import Lane
from .output import Output
from .pipeline import rechunk


@dataclass(frozen=True)
class Ends:
    """What a video goes through before the first layer and after the last.

    Attributes:
        enter: Takes a chunk, `[B, C, T, H, W]`, channels-last.
        leave: Takes what leaves an encoder; or where the frames of a decoder go.
    """

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor] | Output


@dataclass(frozen=True)
class Video:
    """What is known of one video.

    Attributes:
        work: What is computed.
        ends: What is around it.
        group: Frames that become one latent, where they are encoded; else 1.
        frames_per_latent: Frames that a latent becomes, but for the first.
        shape: Channels, height and width of the images.
        pictures: Every frame is a first one.
        begins: The first frame is that of the video; else what is before it is not known.
        relief: Makes room when memory runs out.
    """

    work: Work
    ends: Ends
    group: int
    frames_per_latent: int
    shape: tuple[int, int, int]
    pictures: bool
    begins: bool
    relief: Relief

    def run(
        self, plan: Plan, new_steps: Callable[[Route], Steps], source: Iterator[Tensor]
    ) -> Iterator[Tensor]:
        """Run all of it.

        Args:
            plan: How to begin.
            new_steps: Makes what runs the chunks.
            source: The frames or latents, checked.

        Yields:
            What leaves, piece by piece.
        """
        workspace = Workspace()
        route = self._route(plan, workspace)
        steps = new_steps(route)
        self.relief.frees = workspace.release
        self.relief.parks = lambda: any(
            [lane.cache.park() for lane in steps.route.lanes]  # noqa: C419, all of them
        )
        if not steps.learns:
            workspace.relief = self.relief
        try:
            yield from self._run(plan, steps, workspace, source)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.relief.exhausted(error) from None
        finally:
            # Break the reference cycles so that the caches are freed now.
            workspace.relief = None
            self.relief.forget()
            steps.end()

    def _run(
        self,
        plan: Plan,
        steps: Steps,
        workspace: Workspace,
        source: Iterator[Tensor],
    ) -> Iterator[Tensor]:
        relief = self.relief
        dropped = done = 0
        size = 1 if self.pictures else None if plan.chunk == -1 else plan.chunk * self.group
        for whole in rechunk(source, size, begins=self.begins, attempt=relief.attempt):
            first = steps.route.lanes[0].cache.first
            kept = whole
            if not first and whole.shape[2] % self.group:
                dropped = whole.shape[2] % self.group
                kept = whole[:, :, : whole.shape[2] - dropped]
            while kept.shape[2]:
                # The plan may have become smaller since the chunk was cut.
                length = kept.shape[2] if plan.chunk == -1 else plan.chunk * self.group
                run, kept = kept[:, :, :length], kept[:, :, length:]
                yield from steps.run(run)
                done += run.shape[2]
                steps.route.passed_first(pictures=self.pictures)
                if relief.done and relief.is_new:
                    relief.report(f"{'latent' if self.group == 1 else 'frame'} {done}")
                    plan = self._lowered(plan, steps, workspace)
        if dropped:
            warnings.warn(
                f"the last {dropped} frame{'s were' if dropped > 1 else ' was'} dropped; "
                "the VAE takes 4 n + 1 frames",
                UserWarning,
                stacklevel=5,
            )

    def _lowered(self, plan: Plan, steps: Steps, workspace: Workspace) -> Plan:
        """Go on by the next smaller plan, if there is one and there is memory to change to it."""
        smaller = smaller_plan(self.work, plan)
        if smaller is None:
            return plan

        def changed() -> Route:
            route = self._route(smaller, workspace)
            # What single pictures remember is nothing.
            if not self.pictures:
                route.take(steps.route.tails())
                # Layers of SeedVR2 know whether their first frame was the last; never cut.
                route.lanes[0].cache.after_first |= steps.route.lanes[0].cache.after_first
            return route

        try:
            # As in the steps: tails that are made in inference mode cannot be written to later.
            with torch.inference_mode(False), torch.no_grad():
                route = self.relief.attempt(changed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return plan
        steps.go_by(route)
        return smaller

    def _route(self, plan: Plan, workspace: Workspace) -> Route:
        def new_lane(chains: Sequence[Sequence[CausalLayer]]) -> Lane:
            cache = TemporalCache(
                lone=self.work.lone, band_bytes=plan.part_bytes, workspace=workspace
            )
            cache.first = self.begins
            return Lane(chains, cache, plan.part_bytes)

        leave = self.ends.leave
        if plan.tiles is None:
            finish = leave.write if isinstance(leave, Output) else leave
            return WholeFrames(new_lane(self.work.network.chains()), finish)
        whole, tiles, size = cut_tiles(self.work, plan.tiles)
        route: TiledEncode | TiledDecode
        if isinstance(leave, Output):
            per_latent = self.frames_per_latent
            route = TiledDecode(whole, tiles, size, new_lane, leave, per_latent, self.shape)
        else:
            route = TiledEncode(whole, tiles, size, new_lane, leave)
        if plan.parked:
            route.parking = Parking(self.work.device)
        return route
