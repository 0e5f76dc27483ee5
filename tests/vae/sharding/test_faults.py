"""Ranks that run out of memory, fail, stop or are killed."""

import math

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
from fast_video_vae.vae import load_vae

SIZE = (4, 3)  # of a latent
LATENTS = 3


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(params=["wan2.1", *(pytest.param(f, marks=pytest.mark.slow) for f in VIDEO[1:])])
def family(request):
    return request.param


def given_and_expected(family, *, encode=False):
    vae = load_vae(STATES[family](), dtype=torch.float64)
    step = vae.config.spatial_compression
    size = SIZE[0] * step, SIZE[1] * step
    if encode:
        x = random_frames(1, 3, vae.config.frames(LATENTS), *size)
        return x, vae.encode(x, 1)
    x = latent_for(vae, LATENTS, *size)
    return x, vae.decode(x, 1)


def check(results, expected):
    for actual, *_ in results:
        assert relative_error(actual, expected) <= 1e-12


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.nightly
def test_any_allocation_of_one_rank_can_fail(pool, family, victim, encode):
    x, expected = given_and_expected(family, encode=encode)
    options = {"family": family, "x": x, "victim": victim, "encode": encode}
    seen = pool.run(tasks.with_failing_memory, 2, **options)[victim][1]["seen"]
    for first in range(1 + victim, seen, max(1, seen // 6)):
        results = pool.run(tasks.with_failing_memory, 2, **options, first=first)
        check(results, expected)
        assert results[victim][1]["failed"] == 1


def test_large_allocations_of_one_rank_can_fail(pool):
    """Convolutions run in pieces there, and all ranks go on in smaller steps."""
    x, expected = given_and_expected("wan2.1")
    options = {"family": "wan2.1", "x": x, "victim": 1}
    largest = pool.run(tasks.with_failing_memory, 3, **options)[1][1]["largest"]
    results = pool.run(tasks.with_failing_memory, 3, **options, most=int(0.9 * largest))
    check(results, expected)
    assert [memory["failed"] > 0 for _, memory in results] == [False, True, False]


@pytest.mark.parametrize(
    "family", ["wan2.1", pytest.param("wan2.2", marks=pytest.mark.slow), "seedvr2"]
)
def test_scratch_memory_of_one_rank_can_fail(pool, family):
    """Its convolutions run on half of the frames, norms over the whole frame among them."""
    vae = load_vae(STATES[family](), dtype=torch.float64)
    x = latent_for(vae, 5, *(side * vae.config.spatial_compression for side in SIZE))
    expected = vae.decode(x)
    for actual in pool.run(tasks.with_failing_scratch, 2, family=family, x=x, share=0.9):
        assert relative_error(actual, expected) <= 1e-12


@pytest.mark.parametrize("victim", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_others_end_when_a_rank_is_killed(victim):
    pool = Pool(3)
    try:
        assert ends(pool, victim, "kill") == f"ShardError: rank {victim} of 3 ended unexpectedly"
    finally:
        pool.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fail", " stopped: the disk is gone"),
        ("stop", " stopped"),
        ("interrupt", " was interrupted"),
    ],
)
def test_the_others_end_when_a_rank_ends(pool, victim, how, reason):
    assert ends(pool, victim, how) == f"ShardError: rank {victim} of 3{reason}"
    error, _ = pool.result(victim)
    given = tasks.ENDS.get(how)
    assert error == ("" if given is None else f"{type(given).__name__}: {given}")


def ends(pool, victim, how):
    """End one of three ranks; the error of the others."""
    x, _ = given_and_expected("wan2.1")
    for rank in range(3):
        pool.start(rank, tasks.ends_early, 3, family="wan2.1", x=x, victim=victim, how=how)
    errors = set()
    for rank in {0, 1, 2} - {victim}:
        error, seconds = pool.result(rank)
        assert seconds < 30
        errors.add(error)
    (error,) = errors
    return error


def test_all_ranks_can_stop_together(pool):
    x, expected = given_and_expected("wan2.1")
    for actual in pool.run(tasks.stop_together, 3, family="wan2.1", x=x):
        assert relative_error(actual, expected) <= 1e-12


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("decode", True),
        ("encode", False),
        pytest.param("decode", False, marks=pytest.mark.slow),
        pytest.param("encode", True, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_input_of_one_rank_ends_the_wait_of_the_others(pool, name, late):
    """Also of their next video, while that rank goes on."""
    good, _ = given_and_expected("wan2.1", encode=name == "encode")
    infinite = good.clone()
    infinite[0, 0, 0, 0, 0] = math.nan
    for wrong in (infinite, good[:, :2]):
        calls = [[(name, each, {}), (name, good, {})] for each in (good, wrong)]
        options = {"family": "wan2.1", "calls": calls, "late": late}
        one, two = pool.run(tasks.errors_of_different_calls, 2, **options)
        text = two[0].removeprefix("ValueError: ")
        assert text != two[0]
        assert one == [f"ShardError: rank 1 of 2 stopped: {text}"] * 2
        assert two[1].startswith("ShardError: ")


@pytest.mark.parametrize(
    ("calls", "errors"),
    [
        (
            (("decode", {}), ("encode", {})),
            [
                f"this rank compares {it}, and another one something else"
                for it in ("failures", "dtype")
            ],
        ),
        (
            (("encode", {"skips_static": True}), ("encode", {"skips_static": False})),
            [f"skips_static is {it} on this rank, and 0 to 1 on all" for it in (1, 0)],
        ),
    ],
    ids=["decode and encode", "options"],
)
def test_ranks_that_do_different_things_are_refused(pool, calls, errors):
    x, _ = given_and_expected("wan2.1")
    inputs = {"decode": x, "encode": torch.zeros(1, 3, 9, *(8 * side for side in x.shape[3:]))}
    given = [[(name, inputs[name], switches)] for name, switches in calls]
    found = pool.run(tasks.errors_of_different_calls, 2, family="wan2.1", calls=given)
    assert [error.partition(";")[0] for (error,) in found] == [f"ValueError: {e}" for e in errors]


def test_an_unknown_axis_of_one_rank_is_an_error_of_all(pool):
    errors = pool.run(tasks.error_of_shard, 2, family="wan2.1", axes=["rows", "row"])
    expected = "expected 'rows', 'columns' or None"
    assert errors == [
        f"ValueError: rank 1 has an unknown axis; {expected}",
        f"ValueError: axis is 'row'; {expected}",
    ]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named():
    pool = Pool(3)  # whose groups wait for it later
    try:
        errors = pool.run(tasks.error_of_shard, family="wan2.1", axes=[None] * 3, absent=1)
    finally:
        pool.close()
    assert errors[1] == ""
    expected = "ShardError: rank 1 of 3 did not come within 0.5 s; expected the same call on all"
    assert all(error.startswith(expected) for error in errors[::2])


def test_a_video_after_unshard_says_so(pool):
    x, _ = given_and_expected("wan2.1")
    errors = pool.run(tasks.error_after_leaving, 2, family="wan2.1", x=x)
    assert "this rank left the group" in errors
    assert all(error.endswith("left the group") for error in errors)


def test_copies_of_a_vae_have_no_ranks(pool):
    assert pool.run(tasks.copies, 2, family="wan2.1") == [[None, None, True]] * 2
