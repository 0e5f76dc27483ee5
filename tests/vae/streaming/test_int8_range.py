"""Videos with values that 8 bits cannot hold: they continue in 16 bits, every frame once."""

import copy

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, joined, prepared
from fast_video_vae.tests.vae.streaming.test_int8 import STEP, given, warnings_of
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers.inputs import coding

pytestmark = pytest.mark.usefixtures("all_int8")


@pytest.fixture
def exposed(monkeypatch):
    """A VAE whose codes saturate on a bright latent: then one channel has all of a pixel.

    The root mean square of a pixel is 1, so one of 32 channels can have 5.7 deviations. Only the
    first layers of this narrow VAE have as many, so fewer codes may saturate.
    """
    monkeypatch.setattr(coding, "_MOST_SATURATED", 1e-4)
    state = STATES["wan2.1"]()
    weight, bias = state["decoder.conv1.weight"], state["decoder.conv1.bias"]
    weight[1:], bias[:] = 0, 1
    bias[::2] = -1
    return prepared(load_vae(state, dtype=torch.float32, precision="int8"))


def wide(vae, latent, options=STEP):
    """The frames without int8."""
    other = copy.deepcopy(vae)
    other.precision = "auto"
    return joined(other.decode_stream(latent, options))


@pytest.mark.parametrize(("bright", "source"), [(0, "tensor"), (3, "uneven pieces")])
def test_a_decode_out_of_range_continues_in_16_bits(bright, source, caplog, products, exposed):
    vae = exposed
    latent = given(vae, 6)
    plain = vae.decode(latent, 1)
    assert not warnings_of(caplog)
    latent[:, :, bright] = 1e4 * latent[:, :, 3]  # of a sign that saturates
    at = vae.config.frames(bright) if bright else 0
    expected = torch.cat([plain[:, :, :at], wide(vae, latent)[:, :, at:]], dim=2)
    parts = latent if source == "tensor" else iter(latent.split([3, 2, 1], dim=2))
    pieces = list(vae.decode_stream(parts, STEP))
    frames = torch.cat(pieces, dim=2)
    assert all(piece.shape[2] for piece in pieces)
    assert torch.equal(frames, expected)
    assert frames.isfinite().all()
    (line,) = warnings_of(caplog)
    assert "out of the range of int8" in line
    # The next decode starts in int8 again.
    dark = given(vae, 6)
    products.clear()
    assert torch.equal(vae.decode(dark, 1), plain)
    assert products
    assert torch.equal(joined(vae.decode_stream(latent, STEP)), expected)
    assert len(warnings_of(caplog)) == 1


def test_infinity_in_a_branch_is_not_a_code(caplog):
    state = dict(STATES["wan2.1"]())
    weight = state["decoder.middle.2.residual.2.weight"]
    weight.div_(weight.abs().max()).mul_(3e38)
    vae = prepared(load_vae(state, dtype=torch.float32, precision="int8"))
    latent = given(vae, 3)
    frames = joined(vae.decode_stream(latent, STEP))
    expected = wide(vae, latent)
    assert not expected.isfinite().all()
    torch.testing.assert_close(frames, expected, rtol=0, atol=0, equal_nan=True)
    codes, *nan = warnings_of(caplog)
    assert "out of the range of int8" in codes
    assert ["the reference" in line for line in nan] == [True, True]
