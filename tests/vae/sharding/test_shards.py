"""Videos that several processes share have the frames and latents of one process."""

import random

import pytest
import torch

from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    joined,
    latent_for,
    random_frames,
    relative_error,
)
from fast_video_vae.tests.vae.sharding import tasks
from fast_video_vae.tests.vae.sharding.pool import Pool

# Differences are roundings of sums in another order, in tens of layers.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def input_of(vae, encode, size, latents=4, batch=1):
    """Frames of an encode, or latents of a decode, of `size` in latent lines."""
    pixels = [lines * vae.config.spatial_compression for lines in size]
    if not encode:
        return latent_for(vae, latents, *pixels, batch)
    return random_frames(batch, vae.config.image_channels, vae.config.frames(latents), *pixels)


def check(pool, ranks, family, x, *, dtype=torch.float64, axis=None, device="cpu", **given):
    """All ranks have the result of one process on the CPU; their operations."""
    kept = {name: given[name] for name in ("encode", "chunk", "frames") if name in given}
    expected = joined(tasks.streamed(tasks.vae_of(family, dtype), x, **kept))
    options = {"family": family, "x": x, "dtype": dtype, "axis": axis, "device": device}
    results = pool.run(tasks.convert, ranks, **options, **given)
    for actual, _, sharers in results:
        assert relative_error(actual, expected) <= CLOSE[dtype]
        assert torch.equal(actual, results[0][0])
        assert sharers == ranks or device == "cuda"  # they divide the memory of the device
    return [counts for _, counts, _ in results]


@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(n, marks=pytest.mark.slow) for n in range(24, 200))]
)
def test_any_shards_equal_one_process(pool, seed):
    """Parts of one line and of unequal ones, along each axis, of any video in any steps."""
    chance = random.Random(seed)
    sample = lambda *values: chance.choice(values)  # noqa: E731
    ranks, axis, family = sample(2, 3, 4), sample("rows", "columns", None), sample(*STATES)
    lines, others = chance.randint(ranks, 8), chance.randint(2, min(ranks, 4))
    size = (others, lines) if axis == "columns" else (lines, others)
    encode, dtype = sample(False, True), sample(torch.float64, torch.float64, torch.float32)
    latents = sample(1, 2, 3, 4)
    x = input_of(tasks.vae_of(family, dtype), encode, size, latents, sample(1, 1, 2))
    given = {
        "encode": encode, "chunk": sample(None, 1, 2, -1), "in_pieces": sample(False, True),
        "part_bytes": sample(None, 1 << 14), "stops_before": sample(False, False, True),
    }  # fmt: skip
    if encode and sample(False, True):
        x = torch.cat([x, x[:, :, -1:].expand(-1, -1, 12, -1, -1)], dim=2)  # a static end
    elif not encode and latents > 1:
        last = tasks.vae_of(family, dtype).config.frames(latents) - 1
        given["frames"] = sample(None, range(last // 2, last), range(last, last + 1))
    check(pool, ranks, family, x, dtype=dtype, axis=axis, **given)


def test_a_static_end_costs_no_operations(pool):
    x = input_of(tasks.vae_of("wan2.1"), True, (3, 2), latents=2)
    static = torch.cat([x, x[:, :, -1:].expand(-1, -1, 60, -1, -1)], dim=2)
    skipped, moved = (
        check(pool, 2, "wan2.1", each, encode=True, chunk=2)[0]
        for each in (static, random_frames(*static.shape))
    )
    assert skipped["exchanges"] < moved["exchanges"]


def decode_of(size, latents=2):
    return "decode", input_of(tasks.vae_of("wan2.1"), False, size, latents), {}


GOOD = decode_of((4, 3))
ENCODES = "encode", input_of(tasks.vae_of("wan2.1"), True, (4, 3)), {}
# The calls of two or more ranks, and the error of each.
REFUSED = {
    "width": (
        [GOOD, decode_of((4, 4))],
        [f"width is {n} on this rank, and 3 to 4 on all; expected one number" for n in (3, 4)],
    ),
    "height": (  # of the same largest part
        [decode_of((16, 3)), decode_of((15, 3))],
        [f"height is {n} on this rank, and 15 to 16 on all; expected one number" for n in (16, 15)],
    ),
    "options": (
        [(*ENCODES[:2], {"skips_static": each}) for each in (True, False)],
        [f"skips_static is {n} on this rank, and 0 to 1 on all" for n in (1, 0)],
    ),
    "too many ranks": (
        [decode_of((3, 3))] * 4,
        ["the latents have 3 rows, too few for 4 ranks; expected at most 3 ranks"] * 4,
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_videos_that_cannot_be_shared_are_refused_before_any_work(pool, kind):
    """Then the ranks share their next video."""
    calls, errors = REFUSED[kind]
    given = [[call, GOOD] for call in calls]
    found = pool.run(tasks.make_calls, len(calls), family="wan2.1", calls=given)
    expected = tasks.vae_of("wan2.1").decode(GOOD[1], 1)
    for ((refusal, counts), (frames, _)), error in zip(found, errors, strict=True):
        assert refusal.startswith(f"ValueError: {error}")
        assert set(counts) <= {"votes"}
        assert relative_error(frames, expected) <= CLOSE[torch.float64]


def test_other_work_on_one_rank_is_an_error(pool):
    one, two = pool.run(tasks.make_calls, 2, family="wan2.1", calls=[[GOOD], [ENCODES]])
    assert all(each[0][0].startswith("ValueError: ") for each in (one, two))
    calls = [[decode_of((4, 3), latents)] for latents in (2, 3)]
    (_, _), (error, _) = (
        each[0] for each in pool.run(tasks.make_calls, 2, family="wan2.1", calls=calls)
    )
    assert error.endswith("rank 0 of 2 is at the end of its video")


def test_a_process_group_and_a_known_axis_are_needed():
    vae = tasks.vae_of("wan2.1")
    with pytest.raises(ValueError, match="no process group; expected init_process_group"):
        vae.shard()
    for axis in ("height", 3, ""):
        with pytest.raises(ValueError, match="expected 'rows', 'columns' or None"):
            vae.shard(axis=axis)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
@pytest.mark.parametrize("family", VIDEO)
def test_two_processes_on_one_gpu_equal_one(pool, family):
    x = input_of(tasks.vae_of(family), False, (5, 4))
    check(pool, 2, family, x, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("family", VIDEO)
def test_two_gpus_equal_one_process(family, encode):
    pool = Pool(2, "cpu:gloo,cuda:nccl")
    try:
        x = input_of(tasks.vae_of(family), encode, (5, 4))
        check(pool, 2, family, x, encode=encode, device="cuda")
    finally:
        pool.close()
