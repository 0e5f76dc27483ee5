"""Bands cover the frames once, take the same time, and fit into the memory of each device."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import (
    STATES,
    latent_for,
    published_decode,
    random_frames,
)
from fast_video_vae.tests.vae.streaming.test_bands_faults import around
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import bands as bands_module
from fast_video_vae.vae.planning.bands import BandPlanner
from fast_video_vae.vae.planning.division import Division
from fast_video_vae.vae.planning.job import job_of
from fast_video_vae.vae.planning.tiling import band_cuts
from fast_video_vae.vae.streaming.bands import balance
from fast_video_vae.vae.streaming.bands.crew import Crew

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(scope="module")
def vaes():
    return {name: load_vae(make(), dtype=torch.float32) for name, make in STATES.items()}


def job_for(vae, latent_size, *, encode=False):
    network = vae.encoder if encode else vae.decoder
    return job_of(network, vae.config, (1, *latent_size), torch.float32, CPU, single_frame=False)


def planner(vae, latent_size, count, *, encode=False, **options):
    job = job_for(vae, latent_size, encode=encode)
    return BandPlanner(job, dict.fromkeys(range(count), CPU), 0, **options)


@pytest.mark.parametrize("name", ["wan2.1", "wan2.2", "qwen-image-2.1"])
@pytest.mark.parametrize("encode", [False, True])
@pytest.mark.parametrize(
    ("size", "speeds"),
    [
        ((16, 24), (1, 1)),
        ((16, 24), (1, 3, 2)),
        ((3, 5), (1, 1, 1, 1)),  # odd, and fewer columns than devices could use
        ((1, 7), (1, 1)),
        ((40, 8), (1, 1, 1)),
    ],
)
def test_bands_cover_the_frames_once(vaes, name, encode, size, speeds):
    plans = planner(vaes[name], size, len(speeds), encode=encode)
    found = plans.plan(dict(enumerate(speeds)))
    assert found is not None
    division = Division(plans.job, found.cut, found.axis)
    spans = [band.span for band in found.members]
    assert [spans[0][0], spans[-1][1]] == [0, division.length]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(start < stop and start % division.unit == 0 for start, stop in spans)
    assert found.members[0].number == 0
    for band in found.members:
        tiles = torch.zeros(division.length)
        for tile in band.tiles:
            tiles[slice(*tile[found.axis])] += 1
        assert (tiles[slice(*band.span)] == 1).all()
        assert tiles.sum() == band.span[1] - band.span[0]


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 3.0), (5.0, 2.0)])
@pytest.mark.parametrize("encode", [False, True])
def test_two_bands_are_the_best_of_all(vaes, speeds, encode):
    """Every edge is tried."""
    division = Division(job_for(vaes["wan2.1"], (12, 40), encode=encode), 8, 1)
    known = dict(enumerate(speeds))

    def seconds(edge):
        return division.seconds({0: (0, edge), 1: (edge, division.length)}, known, 0)

    edges = range(division.unit, division.length, division.unit)
    best = min(map(seconds, edges))
    assert division.seconds(division.balanced(known, 0), known, 0) == pytest.approx(best, rel=1e-3)


# Calculated speed-ups of a cut after the attention, by the number of devices.
@pytest.mark.parametrize(("count", "least"), [(2, 1.89), (3, 2.61), (4, 3.32), (8, 5.60)])
def test_the_predicted_speed_of_a_large_video(count, least):
    plans = BandPlanner(
        published_decode(), dict.fromkeys(range(count), CPU), 0, limit_bytes=64 * GIB
    )
    found = plans.plan({})
    division = Division(plans.job, found.cut, found.axis)
    slowest = max(division.work(*span) for span in found.spans.values())
    assert least <= division.work(0, division.length) / slowest < count


def test_the_cut_is_next_to_the_attention_or_where_tiles_are_cut(vaes):
    for name in ("wan2.1", "wan2.2", "qwen-image-2.1"):
        for network in (vaes[name].decoder, vaes[name].encoder):
            seen = [any(part.sees_all for part in layer.blocks) for layer in network.layers()]
            seeing = seen.index(True)
            cuts = band_cuts(network)
            assert {seeing, seeing + 1} & set(cuts)
    assert band_cuts(vaes["seedvr2"].decoder) == []


def test_a_device_that_is_too_slow_has_no_band(vaes):
    plans = planner(vaes["wan2.1"], (12, 20), 3)
    found = plans.plan({0: 1.0, 1: 1.0, 2: 1e-4})
    assert list(found.spans) == [0, 1]
    assert plans.plan({0: 1.0, 1: 1e-4, 2: 1e-4}) is None


def test_a_cpu_next_to_a_gpu_begins_with_little(vaes):
    job = job_for(vaes["wan2.1"], (12, 20))
    plans = BandPlanner(job, {0: torch.device("cuda", 0), 1: CPU}, 1)
    speeds = plans.known({})
    assert speeds[0] > 20 * speeds[1]


def test_more_memory_than_a_device_has_is_divided_into_tiles(vaes):
    size = (40, 60)
    roomy = planner(vaes["wan2.1"], size, 2, limit_bytes=8 * GIB, chunk=1).plan({})
    assert all(len(band.tiles) == 1 for band in roomy.members)
    limit = sum(band.peak_bytes for band in roomy.members) * 9 // 10
    tight = planner(vaes["wan2.1"], size, 2, limit_bytes=limit, chunk=1).plan({})
    for band in tight.members:
        assert band.peak_bytes <= limit // 2  # both are the same device
        assert len(band.tiles) > 1 or band.part_bytes < roomy.members[0].part_bytes


@pytest.mark.parametrize("limit", [1, 3, None])  # bytes for all; None: no device has free memory
def test_a_plan_without_memory_has_the_smallest_bands(vaes, monkeypatch, limit):
    monkeypatch.setattr(bands_module, "free_bytes", lambda device: 0)
    found = planner(vaes["wan2.1"], (12, 20), 4, limit_bytes=limit, chunk=1).plan({})
    roomy = planner(vaes["wan2.1"], (12, 20), 4, limit_bytes=8 * GIB, chunk=1).plan({})
    most = [max(band.peak_bytes for band in each.members) for each in (found, roomy)]
    assert most[0] <= most[1]
    assert len(found.members) > 1


def test_less_memory_for_one_device_leaves_the_others_as_they_are(vaes):
    plans = planner(vaes["wan2.1"], (60, 104), 3, limit_bytes=8 * GIB, chunk=1)
    found = plans.plan({})
    smaller = plans.smaller(found, 1)
    while (less := plans.smaller(smaller, 1)) is not None:
        assert less.members[1].peak_bytes < smaller.members[1].peak_bytes
        smaller = less
    assert smaller.members[1].peak_bytes < found.members[1].peak_bytes
    assert len(smaller.members[1].tiles) > 1
    assert [smaller.members[at] for at in (0, 2)] == [found.members[at] for at in (0, 2)]


def test_a_plan_says_where_its_bands_are(vaes):
    vae = vaes["wan2.1"]
    vae.devices = ["cpu", "cpu"]
    try:
        plan = vae.plan(96, 160, StreamOptions(2))
        text = str(plan)
        assert "2 latents a step" in text
        for band in plan.bands.members:
            assert f"cpu {band.span[0]}-{band.span[1] - 1}" in text
            assert f"about {band.peak_bytes / 2**20:.0f} MiB" in text
        assert plan.peak_bytes == sum(band.peak_bytes for band in plan.bands.members)
        assert vae.plan(96, 160, cuts=False).bands is None
    finally:
        vae.devices = []
    assert vae.plan(96, 160).bands is None


@pytest.fixture
def measured(vaes, monkeypatch):
    """A crew of two devices, of which the second takes three times as long for equal work."""
    monkeypatch.setattr(balance, "_LEAST_S", 0)
    plans, crew = planner(vaes["wan2.1"], (24, 60), 2), Crew()
    crew.choose([CPU, CPU])
    kind = False, torch.float32

    def seconds(bands):
        return {n: work / (1 if n == 0 else 1 / 3) for n, work in plans.works(bands).items()}

    return plans, crew, kind, seconds


def test_bands_follow_the_measured_speeds(measured):
    plans, crew, kind, seconds = measured
    bands = plans.plan(crew.speeds(kind))
    judge = balance.Balance(crew, kind)
    before, cuts = max(seconds(bands).values()), 0
    for _ in range(20):
        better = judge.note(plans, bands, seconds(bands), "a")
        if better is not None:
            bands, cuts = better, cuts + 1
    first, second = seconds(bands).values()
    assert cuts == 1
    assert max(first, second) < 0.75 * before
    assert first == pytest.approx(second, rel=0.1)
    speeds = crew.speeds(kind)
    assert speeds[0] == pytest.approx(3 * speeds[1])
    # The next video begins with these bands, and one of another kind does not.
    assert plans.plan(crew.speeds(kind)).spans == bands.spans
    assert crew.speeds((True, torch.float32)) == {}


def test_memory_that_the_video_takes_does_not_change_its_bands(vaes, monkeypatch):
    """Its own tails and weights take free memory, and would count twice."""
    plans = planner(vaes["wan2.1"], (90, 160), 2)
    monkeypatch.setattr(bands_module, "free_bytes", lambda device: 64 * GIB)
    before = plans.plan({})
    monkeypatch.setattr(bands_module, "free_bytes", lambda device: 1)
    assert plans.recut(before, {}) == before
    left = replace(plans, devices={0: CPU}).recut(before, {})
    assert [len(band.tiles) for band in left.members] == [1]


def test_equal_devices_keep_their_bands(measured):
    plans, crew, kind, _ = measured
    bands = plans.plan({})
    judge = balance.Balance(crew, kind)
    assert all(judge.note(plans, bands, plans.works(bands), "a") is None for _ in range(10))


def test_the_first_chunk_of_a_shape_is_not_measured(measured):
    """Kernels are compiled and tried in it, on one device longer than on another."""
    plans, crew, kind, seconds = measured
    bands = plans.plan({})
    judge = balance.Balance(crew, kind)
    slow = {number: each * (1000 if number == 0 else 1) for number, each in seconds(bands).items()}
    # The first frame, steps of two latents, and a last step of one.
    for shape, each in [("a", slow), ("b", slow), ("b", seconds(bands)), ("c", slow)]:
        judge.note(plans, bands, each, shape)
        assert not crew.speeds(kind)
    judge.note(plans, bands, seconds(bands), "b")
    speeds = crew.speeds(kind)
    assert speeds[0] == pytest.approx(3 * speeds[1])


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_the_first_frame_of_a_video_and_the_step_after_it_are_not_measured(monkeypatch, task):
    monkeypatch.setattr(balance, "_LEAST_S", 0)
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.devices = ["cpu"] * 2
    kind = task == "encode", torch.float32
    latent, video = latent_for(vae, 5, 64, 128), random_frames(1, 3, 17, 64, 128)
    stream, given = (vae.decode_stream, latent) if task == "decode" else (vae.encode_stream, video)
    known = [bool(vae.team.crew.speeds(kind)) for _ in stream(given, StreamOptions(1))]
    assert known == [False, False, False, True, True]


def test_a_slow_device_gets_less(monkeypatch):
    monkeypatch.setattr(balance, "_LEAST_S", 0)
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.devices = ["cpu"] * 2

    def slowed(device, _, work):
        threading.Event().wait(0.06 * (device == 1))
        return work()

    around(monkeypatch, slowed)
    vae.decode(latent_for(vae, 8, 64, 128), 1)
    kind = False, torch.float32
    speeds = vae.team.crew.speeds(kind)
    assert speeds[1] < speeds[0]
    found = vae.plan(64, 128).bands
    if found is not None:  # otherwise it has none at all
        first, second = (band.span[1] - band.span[0] for band in found.members)
        assert second < first
