"""The speed-up that bands are expected to give, from the products of each layer."""

from fast_video_vae.tests.vae.families import published_decode
from fast_video_vae.vae.planning.division import Division
from fast_video_vae.vae.planning.tiling import band_cuts


def speed_up(count: int, *, columns: bool, after_attention: bool) -> float:
    """Return the speed-up of `count` equal devices over one, for a decode by Wan 2.1."""
    job = published_decode()
    *_, tiled, attended = band_cuts(job.network)
    division = Division(job, attended if after_attention else tiled, int(columns))
    spans = division.balanced(dict.fromkeys(range(count), 1.0), 0)
    slowest = max(division.work(*span) for span in spans.values())
    return division.work(0, division.length) / slowest
