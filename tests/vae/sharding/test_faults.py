"""Ranks that run out of memory, fail, stop or are killed."""

import math

import pytest

from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import latent_for, random_frames
from fast_video_vae.tests.vae.sharding import tasks
from fast_video_vae.tests.vae.sharding.pool import Pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def latent():
    return latent_for(tasks.vae_of("wan2.1"), 3, 32, 24)


def ends(pool, latent, victim, how):
    """End one of three ranks; the error of the others."""
    for rank in range(3):
        pool.start(rank, tasks.ends_early, 3, family="wan2.1", x=latent, victim=victim, how=how)
    errors = set()
    for rank in {0, 1, 2} - {victim}:
        error, seconds = pool.result(rank)
        assert seconds < 30
        errors.add(error)
    (error,) = errors
    return error


@pytest.mark.parametrize("victim", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_others_end_when_a_rank_is_killed(latent, victim):
    pool = Pool(3)
    try:
        error = ends(pool, latent, victim, "kill")
    finally:
        pool.close()
    assert error == f"ShardError: rank {victim} of 3 ended unexpectedly"


REASONS = {
    "fail": " stopped: the disk is gone",
    "stop": " stopped",
    "interrupt": " was interrupted",
    "memory": " stopped: ",
}


@each_value_once(how=REASONS, victim=[0, 1])
def test_the_others_end_when_a_rank_ends(pool, latent, how, victim):
    error, reason = ends(pool, latent, victim, how), f"ShardError: rank {victim} of 3{REASONS[how]}"
    own, _ = pool.result(victim)
    if how == "memory":
        assert own.startswith("ExhaustedError: memory ran out in a decode (20.00 MiB more")
        assert error.startswith(reason)
        assert error.isprintable()
    else:
        given = tasks.ENDS.get(how)
        assert own == ("" if given is None else f"{type(given).__name__}: {given}")
        assert error == reason


def test_a_video_after_unshard_says_so(pool, latent):
    assert "this rank left the group" in ends(pool, latent, 2, "leave")
    pool.result(2)


@pytest.mark.parametrize("name", ["decode", "encode"])
def test_a_wrong_input_of_one_rank_ends_the_wait_of_the_others(pool, latent, name):
    """Also of their next video, while that rank goes on."""
    good = latent if name == "decode" else random_frames(1, 3, 9, 32, 24)
    infinite = good.clone()
    infinite[0, 0, 0, 0, 0] = math.nan
    for wrong in (infinite, good[:, :2]):
        calls = [[(name, each, {}), (name, good, {})] for each in (good, wrong)]
        options = {"family": "wan2.1", "calls": calls}
        one, two = (
            [error for error, _ in each] for each in pool.run(tasks.make_calls, 2, **options)
        )
        text = two[0].removeprefix("ValueError: ")
        assert text != two[0]
        assert one == [f"ShardError: rank 1 of 2 stopped: {text}"] * 2
        assert two[1].startswith("ShardError: ")


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
