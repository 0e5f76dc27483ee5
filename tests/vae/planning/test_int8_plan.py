"""The plan of a stream whose windows and tails are 8-bit codes."""

import pytest
import torch

from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.tests.vae.families import STATES, latent_for, prepared
from fast_video_vae.tests.vae.planning.live_bytes import LiveBytes
from fast_video_vae.vae import StreamOptions, load_vae

STEP = StreamOptions(1)

pytestmark = pytest.mark.usefixtures("all_int8")


@pytest.fixture(autouse=True)
def products_of_onednn(monkeypatch):
    """oneDNN takes the codes, also where its sums are not exact, which changes no bytes."""
    monkeypatch.setattr(onednn, "_is_exact", lambda: True)
    if reason := onednn.missing(torch.device("cpu")):
        pytest.skip(reason)  # PyTorch 2.6, and other processors


def measured(vae, precision):
    """The peak bytes of a stream, and those of its plan."""
    vae.precision = precision
    side = 8 * vae.config.spatial_compression
    latent = latent_for(vae, 3, side, side)
    prepared(vae).decode(latent, 1)  # derived weights
    counter = LiveBytes()
    for tensor in (latent, *vae.parameters()):
        counter.ignore(tensor)
    with counter:
        for _ in vae.decode_stream(latent, STEP):
            pass
    return counter.peak, vae.plan(side, side, STEP).peak_bytes


def test_the_plan_saves_the_bytes_that_codes_save():
    vae = load_vae(STATES["seedvr2"](), dtype=torch.float32)
    (peak, planned), (less, planned_less) = (
        measured(vae, precision) for precision in ("auto", "int8")
    )
    assert less < 0.8 * peak
    assert planned - planned_less == pytest.approx(peak - less, rel=0.03)
    assert less <= planned_less
