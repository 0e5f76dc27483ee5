"""Operations between ranks, their bytes, and the memory of a rank, counted without values.

The tensors are on the `meta` device. One rank runs, with partners that are not there.
"""

import contextlib
import copy
import pickle

import pytest
import torch

from fast_video_vae.tests.benchmarks import count_bytes
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import STATES
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes, meta_vae, without_values
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.sharding.shard import ShardGroup

# Frames of the counts, and a rank with two neighbours.
HEIGHT, WIDTH = 720, 1280


class Absent:
    """Groups and messages of ranks that are not there: each operation is complete at once."""

    def __init__(self, rank, size):
        self.number, self.ranks = rank, size

    def rank(self):
        return self.number

    def size(self):
        return self.ranks

    def send(self, *_):
        return self

    recv = allgather = allreduce = send

    def wait(self):
        pass

    def run(self, operate):
        operate()

    @contextlib.contextmanager
    def one_video(self):
        yield

    preparing = one_video
    place = 0, 0

    def leave(self):
        pass


def rank_of(size, rank, axis=None):
    absent = Absent(rank, size)
    return ShardGroup(torch.device("meta"), axis, absent, absent, absent)


def counted(vae, x, shards, *, encode=False, chunk=1):
    """Run a stream; the operations of each step, and the peak of the memory."""
    stream = vae.encode_stream if encode else vae.decode_stream
    steps, live = [], LiveBytes()
    for tensor in (x, *vae.parameters()):
        live.ignore(tensor)
    vae.shards = shards
    try:
        with without_values(), torch.no_grad(), live, count_bytes.FusedAttention():
            for _ in stream(x, StreamOptions(chunk, limit_bytes=1 << 40)):
                if shards is not None:
                    steps.append(shards.counts.copy())
    finally:
        vae.shards = None
    return steps, live.peak


def operations(steps):
    """The operations between the last two pieces."""
    return steps[-1] - steps[-2]


def latents(vae, count, height=HEIGHT, width=WIDTH):
    step = vae.config.spatial_compression
    shape = 1, vae.config.latent_channels, count, height // step, width // step
    return torch.empty(shape, device="meta", dtype=vae.dtype)


def frames(vae, count, height=HEIGHT, width=WIDTH):
    shape = 1, 3, vae.config.frames(count), height, width
    return torch.empty(shape, device="meta", dtype=vae.dtype)


@pytest.mark.parametrize(("axis", "most_mb"), [("rows", 19), ("columns", 11)])
def test_bytes_per_boundary_and_direction(axis, most_mb):
    vae = meta_vae("wan2.1", 96, "bfloat16")
    shards = rank_of(4, 1, axis)
    steps, _ = counted(vae, latents(vae, 3), shards)
    sent = operations(steps)
    assert sent["bytes to 0"] == sent["bytes to 2"]
    assert 0 < sent["bytes to 0"] <= most_mb * 1e6
    alone, _ = counted(vae, latents(vae, 3, 64, 64), rank_of(1, 0, axis))
    assert not any(name.startswith("bytes") for name in alone[-1])


WIDTHS = {"wan2.1": 96, "wan2.2": 160, "seedvr2": 128}


@each_value_once(family=WIDTHS, encode=[False, True], axis=["rows", "columns"])
def test_memory_of_a_rank(family, encode, axis):
    """A rank of four has about a quarter of the memory, and no more than its plan says."""
    vae = meta_vae(family, WIDTHS[family], "bfloat16")
    small = frames(vae, 3, 64, 64) if encode else latents(vae, 3, 64, 64)
    counted(vae, small, None, encode=encode)  # derives weights
    x = frames(vae, 3) if encode else latents(vae, 3)
    _, peak = counted(vae, x, rank_of(4, 1, axis), encode=encode)
    _, whole = counted(vae, x, None, encode=encode)
    assert peak <= 0.35 * whole
    options = StreamOptions(1, limit_bytes=1 << 40)
    plan = vae.plan(HEIGHT, WIDTH, options, encode=encode, ranks=4)
    assert 0.85 * plan.peak_bytes <= peak <= 1.02 * plan.peak_bytes


def test_the_longer_side_is_divided():
    vae = meta_vae("wan2.1", 32, "bfloat16")
    for (height, width), axis in (((128, 192), "columns"), ((192, 128), "rows")):
        one, other = (
            operations(counted(vae, latents(vae, 3, height, width), rank_of(2, 0, each))[0])
            for each in (None, axis)
        )
        assert one == other


def test_copies_of_a_vae_have_no_ranks():
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    vae.shards = rank_of(2, 0)
    for other in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert other.shards is None
