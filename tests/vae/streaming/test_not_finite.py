"""Decodes whose frames are not finite, though their latent is and the dtype is not narrow."""

import pytest
import torch

from fast_video_vae.kernels import modules
from fast_video_vae.tests.vae.families import STATES, joined, latent_for, relative_error
from fast_video_vae.vae import StreamOptions, load_vae

LINE = "is not finite in a decode"


@pytest.fixture
def break_aten(monkeypatch):
    """Return a function that makes the library's convolutions return NaN from a call on."""

    def plant(first):
        launches, calls = dict(modules.backend("aten").launches()), []
        convolve = launches["conv3d"]

        def broken(*args):
            calls.append(args)
            y = convolve(*args)
            return y.fill_(torch.nan) if len(calls) > first else y

        launches["conv3d"] = broken
        monkeypatch.setattr(modules.backend("aten"), "launches", lambda: launches)

    return plant


@pytest.mark.parametrize(
    ("dtype", "first", "tile"),
    [(torch.float32, 70, None), (torch.float16, 200, (16, 16)), (torch.bfloat16, 0, None)],
)
def test_the_reference_continues_with_the_next_frame(first, tile, dtype, break_aten, caplog):
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    latent = latent_for(vae, 6, 32, 32)
    expected = vae.decode(latent)
    vae = load_vae(STATES["wan2.1"](), dtype=dtype)
    options = StreamOptions(chunk=1, tile=tile)
    break_aten(first)
    pieces = list(vae.decode_stream(latent, options))
    assert sum(piece.shape[2] for piece in pieces) == 21
    share = 1e-5 if dtype == torch.float32 else 40 * torch.finfo(dtype).eps
    assert relative_error(joined(pieces), expected) <= share
    (line,) = [each for each in caplog.messages if LINE in each]
    assert "the reference ops in float32 continue this video" in line
    assert "\n" not in line


def test_frames_that_no_op_computes_finitely_are_delivered(caplog):
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    latent = latent_for(vae, 3, 32, 32)
    with torch.no_grad():
        vae.decoder.conv1.weight.mul_(1e38)
        vae.decoder.conv1.bias.fill_(3e38)
    video = joined(list(vae.decode_stream(iter(latent.split(1, 2)))))
    assert video.shape[2] == 9
    assert not video.isfinite().all()
    lines = [each for each in caplog.messages if LINE in each]
    assert ["nor with the reference" in each for each in lines] == [False, True]
    caplog.clear()
    assert not joined(list(vae.decode_stream(latent))).isfinite().all()
    assert not caplog.messages  # which is known of this VAE
