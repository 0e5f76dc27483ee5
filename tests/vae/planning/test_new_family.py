"""A family that the product does not have is planned and cut into tiles like its own."""

import functools
from fractions import Fraction

import pytest
import torch
from torch import nn

from fast_video_vae.tests.vae.families import close, joined, random_frames, random_latent
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.causal_layer import CausalLayer
from fast_video_vae.vae.layers.conv import PointwiseConv
from fast_video_vae.vae.layers.temporal_cache import TemporalCache, Workspace, canonical
from fast_video_vae.vae.models.base import Network
from fast_video_vae.vae.models.executor import Executor, rechunk
from fast_video_vae.vae.models.wan_blocks import Downsample
from fast_video_vae.vae.planning.job import StreamJob
from fast_video_vae.vae.planning.measured import BASE_BYTES
from fast_video_vae.vae.planning.plan import make_plan
from fast_video_vae.vae.streaming.tiled_executor import Joined, tiled_executor

WAYS = [(False, 1, None), (False, 3, (27, 38)), (True, 3, None), (True, 1, (27, 38))]
ways = pytest.mark.parametrize(("encodes", "step", "tile"), WAYS)


class Centered(CausalLayer):
    sees_all = True

    def forward(self, x, cache):
        return x.sub_(x.mean((3, 4), keepdim=True))


class Residual(CausalLayer):
    def __init__(self, width):
        super().__init__()
        self.growth = 2
        self.widen, self.mix = CausalConv3d(width, 2 * width), PointwiseConv(2 * width, width)

    def forward(self, x, cache):
        return x.add_(self.mix(nn.functional.silu(self.widen(x, cache), inplace=True)))


class Grow(CausalConv3d):
    scale, times = Fraction(2), 2

    def forward(self, x, cache):
        phases = super().forward(x, cache).unflatten(1, (-1, 2, 2, 2))
        frames = phases.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        frames = frames[:, :, 1:] if cache.first else frames
        return canonical(frames.contiguous(memory_format=torch.channels_last_3d))


class Toy(Network):
    def __init__(self, encodes):
        super().__init__()
        half = [Residual(16), Downsample(16, temporal=True), Residual(16), Centered()]
        double = [Centered(), Residual(32), Grow(32, 128, (3, 1, 1)), Residual(16)]
        self.enter = CausalConv3d(3, 16) if encodes else CausalConv3d(4, 32)
        self.body = nn.ModuleList(half if encodes else double)
        self.leave = CausalConv3d(16, 8 if encodes else 3)


def made(encodes, *size):
    """The job of a network with random weights for latents of this size, and its input."""
    network = Toy(encodes).requires_grad_(False)
    for each in network.parameters():
        each.copy_(random_latent(*each.shape) / each[0].numel() ** 0.5)
    job = StreamJob(network, (1, *size), torch.float32, torch.device("cpu"))
    frames = 1 + 6 * job.frames
    return job, random_frames(1, network.enter.weight.shape[1], frames, *job.sizes[0])


def stream(job, plan, x, step):
    """Yield runs of results, as a session computes them."""
    new = functools.partial(TemporalCache, band_bytes=plan.part_bytes, workspace=Workspace())
    executor = Executor(job.network.chains(), new(), plan.part_bytes)
    if plan.tiles:
        executor = tiled_executor(job, plan.tiles, new, plan.part_bytes, parked=False)
    for run in rechunk([x], step * job.frames):
        chunk = canonical(run.clone(memory_format=torch.channels_last_3d))
        if job.encodes or not plan.tiles:
            yield from executor.advance(chunk)
        else:
            frames = 2 * chunk.shape[2] - executor.cache.first
            yield executor.run(chunk, Joined(chunk, frames, job.end)).whole
        for cache in executor.caches:
            cache.first = False


@ways
def test_the_plan_predicts_the_memory(encodes, step, tile):
    job, x = made(encodes, 40, 60)
    plan, counter = make_plan(job, 1 << 30, chunk=step, tile=tile), LiveBytes()
    joined(stream(job, plan, x, step))  # derives weights
    for each in (x, *job.network.parameters()):
        counter.ignore(each)
    with counter:
        for _ in stream(job, plan, x, step):
            pass
    assert plan.peak_bytes - BASE_BYTES == pytest.approx(counter.peak, rel=0.08)


@ways
def test_steps_and_tiles_give_the_frames_of_one_step(encodes, step, tile):
    job, x = made(encodes, 15, 20)
    plan, whole = (make_plan(job, 1 << 30, chunk=step, tile=each) for each in (tile, None))
    assert (plan.tiles is None) == (tile is None)
    close(joined(stream(job, plan, x, step)), joined(stream(job, whole, x, x.shape[2])))
