"""Videos that several processes share have the frames and latents of one process."""

import pytest
import torch

from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    latent_for,
    random_frames,
    relative_error,
)
from fast_video_vae.tests.vae.sharding import tasks
from fast_video_vae.tests.vae.sharding.pool import Pool
from fast_video_vae.vae import StreamOptions, load_vae

# Differences are roundings of sums in another order, in tens of layers.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}

# Rows and columns of latents: parts of one line, of unequal lines, and of a divisor of them.
SPLITS = [
    pytest.param(2, "rows", (5, 3), id="2 ranks, rows 2 and 3"),
    pytest.param(3, "columns", (2, 7), id="3 ranks, columns 2, 2 and 3"),
    pytest.param(4, "rows", (4, 2), id="4 ranks of one row"),
    pytest.param(4, "columns", (3, 9), id="4 ranks, columns 2, 2, 2 and 3", marks=pytest.mark.slow),
    pytest.param(2, "columns", (3, 2), id="2 ranks of one column", marks=pytest.mark.slow),
    pytest.param(3, "rows", (8, 3), id="3 ranks, rows 2, 3 and 3", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def vae_of(family, dtype):
    return load_vae(STATES[family](), dtype=dtype)


def input_of(vae, encode, size, latents=4, batch=1):
    """Frames of an encode, or latents of a decode, of `size` in latent lines."""
    step = vae.config.spatial_compression
    pixels = [lines * step for lines in size]
    if not encode:
        return latent_for(vae, latents, *pixels, batch)
    return random_frames(batch, vae.config.image_channels, vae.config.frames(latents), *pixels)


def whole(vae, encode, x, chunk=None, **given):
    stream = vae.encode_stream if encode else vae.decode_stream
    return torch.cat(list(stream(x, StreamOptions(chunk), **given)), dim=2)


def check(
    pool, ranks, family, x, *, encode=False, dtype=torch.float64, axis=None, device="cpu", **given
):
    """All ranks have the result of one process on the CPU."""
    expected = whole(vae_of(family, dtype), encode, x, **given)
    options = {"family": family, "x": x, "encode": encode, "dtype": dtype, "axis": axis}
    options |= {"device": device}
    results = pool.run(tasks.convert, ranks, **options, **given)
    for actual, _ in results:
        assert relative_error(actual, expected) <= CLOSE[dtype]
        assert torch.equal(actual, results[0][0])
    return results


FAMILIES = ["wan2.1", *(pytest.param(each, marks=pytest.mark.slow) for each in [*STATES][1:])]


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "axis", "size"), SPLITS)
def test_shards_equal_one_process(pool, ranks, axis, size, family, encode):
    x = input_of(vae_of(family, torch.float64), encode, size)
    check(pool, ranks, family, x, encode=encode, axis=axis)


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("family", VIDEO)
def test_shards_in_float32_equal_one_process(pool, family, encode):
    x = input_of(vae_of(family, torch.float32), encode, (5, 6))
    check(pool, 3, family, x, encode=encode, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("chunk", [1, 2, -1])
def test_any_chunk_equals_one_process(pool, family, encode, chunk):
    x = input_of(vae_of(family, torch.float64), encode, (4, 2), latents=4, batch=2)
    check(pool, 2, family, x, encode=encode, chunk=chunk)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_a_single_frame_equals_one_process(pool, family, encode):
    x = input_of(vae_of(family, torch.float64), encode, (3, 4), latents=1)
    check(pool, 2, family, x, encode=encode)


@pytest.mark.parametrize("family", ["wan2.1", pytest.param("seedvr2", marks=pytest.mark.slow)])
def test_some_frames_equal_one_process(pool, family):
    x = input_of(vae_of(family, torch.float64), False, (4, 3))
    check(pool, 2, family, x, frames=range(6, 11))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_a_static_end_is_skipped_on_all_ranks(pool, family):
    x = input_of(vae_of(family, torch.float64), True, (3, 2), latents=2)
    static = torch.cat([x, x[:, :, -1:].expand(-1, -1, 60, -1, -1)], dim=2)
    (_, skipped), *_ = check(pool, 2, family, static, encode=True, chunk=2)
    moving = random_frames(*static.shape)
    counts = pool.run(tasks.convert, 2, family=family, x=moving, encode=True, chunk=2)[0][1]
    assert skipped["exchanges"] < counts["exchanges"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_latents_of_an_iterable_equal_one_process(pool, ranks):
    vae = vae_of("wan2.1", torch.float64)
    x = input_of(vae, False, (3, 4))
    expected = vae.decode(x)
    for actual in pool.run(tasks.decode_pieces, ranks, family="wan2.1", x=x):
        assert relative_error(actual, expected) <= CLOSE[torch.float64]


def test_parts_of_frames_are_the_same_on_all_ranks(pool):
    """Steps follow the largest part, so ranks with fewer rows take equal ones."""
    x = input_of(vae_of("wan2.1", torch.float64), False, (5, 4))
    expected = vae_of("wan2.1", torch.float64).decode(x)
    for actual in pool.run(tasks.decode_in_parts, 4, family="wan2.1", x=x, part_bytes=1 << 14):
        assert relative_error(actual, expected) <= CLOSE[torch.float64]


def test_ranks_on_one_device_divide_its_memory(pool):
    assert pool.run(tasks.sharers, 3) == [3, 3, 3]


@pytest.mark.parametrize("axis", ["rows", "columns", None])
def test_more_ranks_than_lines_is_an_error_before_any_work(pool, axis):
    x = input_of(vae_of("wan2.1", torch.float64), False, (3, 3))
    lines = axis or "rows"
    for error, counts in pool.run(tasks.error_of, 4, family="wan2.1", x=x, axis=axis):
        assert error == (
            f"the latents have 3 {lines}, too few for 4 ranks; expected at most 3 ranks"
        )
        assert set(counts) <= {"votes"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("width", [(4, 3), (4, 4)]),
        ("height", [(16, 3), (15, 3)]),  # of the same largest part
    ],
)
def test_videos_of_other_sizes_are_an_error(pool, name, sizes):
    vae = vae_of("wan2.1", torch.float64)
    videos = [input_of(vae, False, size, latents=2) for size in sizes]
    lines = [size[name == "width"] for size in sizes]
    errors = pool.run(tasks.error_of_other_videos, 2, family="wan2.1", videos=videos)
    assert errors == [
        f"{name} is {each} on this rank, and {min(lines)} to {max(lines)} on all; expected one "
        "number"
        for each in lines
    ]


def test_a_longer_video_on_one_rank_is_an_error(pool):
    vae = vae_of("wan2.1", torch.float64)
    videos = [input_of(vae, False, (4, 3), latents=latents) for latents in (2, 3)]
    errors = pool.run(tasks.error_of_other_videos, 2, family="wan2.1", videos=videos)
    assert errors == ["", "rank 0 of 2 is at the end of its video"]


def test_the_group_serves_after_an_error_of_all_ranks(pool):
    x = input_of(vae_of("wan2.1", torch.float64), False, (3, 3))
    good = input_of(vae_of("wan2.1", torch.float64), False, (4, 3))
    expected = vae_of("wan2.1", torch.float64).decode(good)
    for actual in pool.run(tasks.decode_after_error, 4, family="wan2.1", bad=x, good=good):
        assert relative_error(actual, expected) <= CLOSE[torch.float64]


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match="no process group; expected init_process_group"):
        vae_of("wan2.1", torch.float32).shard()


@pytest.mark.parametrize("axis", ["height", 3, ""])
def test_an_unknown_axis_is_refused(axis):
    with pytest.raises(ValueError, match="expected 'rows', 'columns' or None"):
        vae_of("wan2.1", torch.float32).shard(axis=axis)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
@pytest.mark.parametrize("family", VIDEO)
def test_two_processes_on_one_gpu_equal_one(pool, family):
    x = input_of(vae_of(family, torch.float64), False, (5, 4))
    check(pool, 2, family, x, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("family", VIDEO)
def test_two_gpus_equal_one_process(family, encode):
    pool = Pool(2, "cpu:gloo,cuda:nccl")
    try:
        x = input_of(vae_of(family, torch.float64), encode, (5, 4))
        check(pool, 2, family, x, encode=encode, device="cuda")
    finally:
        pool.close()
