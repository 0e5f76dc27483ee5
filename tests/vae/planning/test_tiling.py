"""Which layers run in tiles, how far a tile and a part of a video reach, and tails on the host."""

import pytest
import torch

from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, WAN, close, joined, latent_for
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import tiling


@pytest.fixture(scope="module", params=WAN)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


def test_layers_that_see_whole_frames_are_not_tiled(vae):
    assert min(len(tiling.can_cut(network)) for network in (vae.decoder, vae.encoder)) >= 3
    sees = [any(part.sees_all for part in layer.blocks) for layer in vae.decoder.layers()]
    assert not any(any(sees[cut:]) for cut in tiling.band_cuts(vae.decoder))
    sees = [any(part.sees_all for part in layer.blocks) for layer in vae.encoder.layers()]
    assert not any(any(sees[:cut]) for cut in tiling.band_cuts(vae.encoder))
    seedvr2 = load_vae(random_seedvr2(), dtype=torch.float32)
    assert not tiling.can_cut(seedvr2.decoder)
    assert not tiling.can_cut(seedvr2.encoder)
    latent = torch.randn(1, 16, 2, 8, 8)
    tiled = joined(seedvr2.decode_stream(latent, StreamOptions(tile=(32, 32))))
    assert torch.equal(tiled, seedvr2.decode(latent))


def test_a_late_range_skips_latents_outside_its_reach(vae):
    latent = latent_for(vae, 48, 16, 16)
    expected = vae.decode(latent)[:, :, 180:]
    seen = []
    vae.decoder.conv1.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[2]))
    options = StreamOptions(2, tile=(8, 8))
    close(joined(vae.decode_stream(latent, options, frames=range(180, 189))), expected)
    assert sum(seen) < 46
