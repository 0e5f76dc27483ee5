"""The plan of a stream whose windows and tails are 8-bit codes."""

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, latent_for, prepared, random_frames
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes
from fast_video_vae.vae import StreamOptions, load_vae

STEP = StreamOptions(1)

pytestmark = pytest.mark.usefixtures("all_int8")


def measured(vae, encode, precision):
    """The peak bytes of a stream, and those of its plan."""
    vae.precision = vae.encode_precision = precision
    side = 8 * vae.config.spatial_compression
    if encode:
        value, run = random_frames(1, vae.config.image_channels, 9, side, side), vae.encode_stream
    else:
        value, run = latent_for(vae, 3, side, side), vae.decode_stream
    prepared(vae)
    list(run(value, STEP))  # derived weights
    counter = LiveBytes()
    for tensor in (value, *vae.parameters()):
        counter.ignore(tensor)
    with counter:
        for _ in run(value, STEP):
            pass
    return counter.peak, vae.plan(side, side, STEP, encode=encode).peak_bytes


@pytest.mark.parametrize("encode", [False, True])
@pytest.mark.parametrize("family", ["wan2.1", "wan2.2", "seedvr2"])
def test_the_plan_saves_the_bytes_that_codes_save(family, encode):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    vae.skips_static = False
    (peak, planned), (less, planned_less) = (
        measured(vae, encode, precision) for precision in ("auto", "int8")
    )
    assert less < 0.8 * peak
    assert planned - planned_less == pytest.approx(peak - less, rel=0.03)
    assert less <= planned_less
