"""Bands cover the frames once, divide the work by shares, and fit into the memory of devices."""

import itertools

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, published_decode
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning.bands import Place, divide
from fast_video_vae.vae.planning.job import job_of
from fast_video_vae.vae.planning.plan import make_bands
from fast_video_vae.vae.planning.tiling import band_cuts, places

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(scope="module")
def vaes():
    return {name: load_vae(make(), dtype=torch.float32) for name, make in STATES.items()}


def bands_of(job, shares, limit=64 * GIB, **options):
    places = {n: Place(f"cpu {n}", CPU, share, limit) for n, share in enumerate(shares)}
    return make_bands(job, places, 0, **options)


def job_for(vae, latent_size, *, encode=False):
    network = vae.encoder if encode else vae.decoder
    return job_of(network, vae.config, (1, *latent_size), torch.float32, CPU, single_frame=False)


def times(job, bands, shares):
    """The products of one device, and of the slowest of several, at the cut of the bands."""
    at = bands.members[0].tiles.cut, bands.axis
    several = divide(job, *at, dict(enumerate(shares)), 0)
    return divide(job, *at, {0: 1.0}, 0).time, several.time


@pytest.mark.parametrize(
    ("name", "encode", "size", "shares"),
    [
        ("wan2.1", False, (16, 24), (1, 3, 2)),
        ("wan2.1", True, (3, 5), (1, 1, 1, 1)),  # odd, and fewer columns than devices could use
        ("wan2.2", True, (40, 8), (1, 1, 1)),
        ("wan2.2", False, (1, 7), (1, 1)),
    ],
)
def test_bands_cover_the_frames_once(vaes, name, encode, size, shares):
    job = job_for(vaes[name], size, encode=encode)
    found = bands_of(job, shares)
    axis = found.axis
    length = divide(job, found.members[0].tiles.cut, axis, {0: 1.0}, 0).length
    spans = [band.span(axis) for band in found.members]
    assert [spans[0][0], spans[-1][1]] == [0, length]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert found.members[0].number == 0
    for band in found.members:
        tiles = torch.zeros(length)
        for tile in places(job, band.tiles):
            tiles[slice(*tile[axis])] += 1
        start, stop = band.span(axis)
        assert (tiles[start:stop] == 1).all()
        assert tiles.sum() == stop - start > 0


# Speed-ups that are asked for by the number of devices, those of a cut after the attention.
@pytest.mark.parametrize(("count", "least"), [(2, 1.90), (8, 5.89)])
def test_the_predicted_speed_of_a_large_video(count, least):
    job = published_decode()
    found = bands_of(job, [1] * count)
    one, several = times(job, found, [1] * count)
    assert least <= one / several < count
    assert found.members[0].tiles.cut == min(band_cuts(job.network))


@pytest.mark.parametrize("shares", [(3, 1), (1, 1, 5)])
def test_the_work_is_divided_by_the_shares(shares):
    job = published_decode()
    found = bands_of(job, shares)
    one, several = times(job, found, shares)
    assert one / several > 0.8 * sum(shares)  # the layers on whole frames are repeated
    spans = [band.span(found.axis) for band in found.members]
    lengths = [stop - start for start, stop in spans]
    assert (lengths[0] < lengths[-1]) == (shares[0] < shares[-1])


def test_a_share_that_is_too_small_has_no_band(vaes):
    job = job_for(vaes["wan2.1"], (12, 20))
    assert [band.number for band in bands_of(job, (1.0, 1.0, 1e-4)).members] == [0, 1]
    assert bands_of(job, (1.0, 1e-4, 1e-4)) is None
    assert bands_of(job, (1e-4, 1.0)).members[0].number == 0


def test_more_memory_than_a_device_has_is_divided_into_tiles(vaes):
    job = job_for(vaes["wan2.1"], (40, 60))
    roomy = bands_of(job, (1, 1), chunk=1)
    assert all(band.count == 1 for band in roomy.members)
    limit = roomy.members[0].peak_bytes * 9 // 10
    for band in bands_of(job, (1, 1), limit, chunk=1).members:
        assert band.peak_bytes <= limit
        assert band.count > 1 or band.part_bytes < roomy.members[0].part_bytes
    smallest = bands_of(job, (1, 1), 1, chunk=1)
    assert max(band.peak_bytes for band in smallest.members) <= limit


def test_a_plan_says_where_its_bands_are(vaes):
    vae = vaes["wan2.1"]
    vae.devices = ["cpu", "cpu"]
    try:
        plan = vae.plan(96, 160, StreamOptions(2))
        text = str(plan)
        assert "2 latents a step" in text
        for band in plan.bands.members:
            start, stop = band.span(plan.bands.axis)
            assert f"cpu {start}-{stop - 1}" in text
            assert f"about {band.peak_bytes / 2**20:.0f} MiB" in text
        assert plan.peak_bytes == sum(band.peak_bytes for band in plan.bands.members)
        assert vae.plan(96, 160, cuts=False).bands is None
    finally:
        vae.devices = []
    assert vae.plan(96, 160).bands is None


def test_two_devices_of_one_memory_divide_it(vaes):
    vae = vaes["wan2.1"]
    try:
        vae.devices = ["cpu"] * 2
        limit = vae.plan(640, 960, StreamOptions(1, limit_bytes=8 * GIB)).peak_bytes * 19 // 20
        plan = vae.plan(640, 960, StreamOptions(1, limit_bytes=limit))
        assert plan.peak_bytes <= limit
    finally:
        vae.devices = []
