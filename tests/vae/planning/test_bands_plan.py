"""Bands cover the frames once, take the same time, and fit into the memory of each device."""

import itertools

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, published_decode
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import bands as bands_module
from fast_video_vae.vae.planning.bands import BandPlanner
from fast_video_vae.vae.planning.division import Division
from fast_video_vae.vae.planning.job import job_of

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
def test_bands_cover_the_frames_once(vaes, monkeypatch, name, encode, size, speeds):
    plans = planner(vaes[name], size, len(speeds), encode=encode)
    monkeypatch.setattr(BandPlanner, "speeds", dict(enumerate(speeds)))
    found = plans.plan()
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


# Calculated speed-ups of a cut after the attention, by the number of devices.
@pytest.mark.parametrize(("count", "least"), [(2, 1.89), (3, 2.61), (4, 3.32), (8, 5.60)])
def test_the_predicted_speed_of_a_large_video(count, least):
    plans = BandPlanner(
        published_decode(), dict.fromkeys(range(count), CPU), 0, limit_bytes=64 * GIB
    )
    found = plans.plan()
    division = Division(plans.job, found.cut, found.axis)
    slowest = max(division.work(*band.span) for band in found.members)
    assert least <= division.work(0, division.length) / slowest < count


def test_a_device_that_is_too_slow_has_no_band(vaes, monkeypatch):
    plans = planner(vaes["wan2.1"], (12, 20), 3)
    for speeds, numbers in (((1.0, 1.0, 1e-4), [0, 1]), ((1.0, 1e-4, 1e-4), None)):
        monkeypatch.setattr(BandPlanner, "speeds", dict(enumerate(speeds)))
        found = plans.plan()
        assert (found and [band.number for band in found.members]) == numbers


def test_more_memory_than_a_device_has_is_divided_into_tiles(vaes):
    size = (40, 60)
    roomy = planner(vaes["wan2.1"], size, 2, limit_bytes=8 * GIB, chunk=1).plan()
    assert all(len(band.tiles) == 1 for band in roomy.members)
    limit = sum(band.peak_bytes for band in roomy.members) * 9 // 10
    tight = planner(vaes["wan2.1"], size, 2, limit_bytes=limit, chunk=1).plan()
    for band in tight.members:
        assert band.peak_bytes <= limit // 2  # both are the same device
        assert len(band.tiles) > 1 or band.part_bytes < roomy.members[0].part_bytes


@pytest.mark.parametrize("limit", [1, 3, None])  # bytes for all; None: no device has free memory
def test_a_plan_without_memory_has_the_smallest_bands(vaes, monkeypatch, limit):
    monkeypatch.setattr(bands_module, "free_bytes", lambda device: 0)
    found = planner(vaes["wan2.1"], (12, 20), 4, limit_bytes=limit, chunk=1).plan()
    roomy = planner(vaes["wan2.1"], (12, 20), 4, limit_bytes=8 * GIB, chunk=1).plan()
    most = [max(band.peak_bytes for band in each.members) for each in (found, roomy)]
    assert most[0] <= most[1]
    assert len(found.members) > 1


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
