"""Which layers run in tiles, how far a tile and a part of a video reach, and tails on the host."""

from dataclasses import replace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, WAN, close, joined, latent_for, random_frames
from fast_video_vae.tests.wan22 import random_wan22
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.models.receptive_field import frame_sizes
from fast_video_vae.vae.planning import tiling
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.streaming.cache_offload import Parking
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode, TiledEncode


@pytest.fixture(scope="module", params=WAN)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


def test_layers_that_see_whole_frames_are_not_tiled(vae):
    assert min(len(tiling.can_cut(network)) for network in (vae.decoder, vae.encoder)) >= 3
    seedvr2 = load_vae(random_seedvr2(), dtype=torch.float32)
    assert not tiling.can_cut(seedvr2.decoder)
    assert not tiling.can_cut(seedvr2.encoder)
    latent = torch.randn(1, 16, 2, 8, 8)
    tiled = joined(seedvr2.decode_stream(latent, StreamOptions(tile=(32, 32))))
    assert torch.equal(tiled, seedvr2.decode(latent))


def test_the_halo_of_wan_is_the_reach_of_its_layers():
    """20 pixels of the output from the last temporal upsampling on: 40 of a frame of Wan 2.2."""
    for state, layers in ((random_state_dict(8), 8), (random_wan22(8, 8), 3)):
        network = load_vae(state, dtype=torch.float32).decoder
        tail = network.layers()[-layers:]
        size = frame_sizes(network.layers(), (64, 64))[-layers - 1]
        end = frame_sizes(tail, size)[-1]
        middle = (end[0] // 2 - 8, end[0] // 2 + 8)
        tile = tiling.make_tile([tail], size, middle, middle)
        scale = end[0] // size[0]
        (start, stop), _ = tile.spans[0]
        assert (middle[0] - scale * start, scale * stop - middle[1]) == (20, 20)


def test_a_late_range_skips_latents_outside_its_reach(vae, monkeypatch):
    latent = latent_for(vae, 80, 16, 16)
    expected = vae.decode(latent)[:, :, 300:]
    seen = []
    forward = type(vae.decoder.conv1).forward

    def counted(self, x, *arguments, **options):
        if self is vae.decoder.conv1:
            seen.append(x.shape[2])
        return forward(self, x, *arguments, **options)

    monkeypatch.setattr(type(vae.decoder.conv1), "forward", counted)
    runs = (latent[:, :, at : at + 1] for at in range(80))
    for source, options in (
        (latent, StreamOptions()),
        (runs, StreamOptions()),
        (latent, StreamOptions(2, tile=(8, 8))),
    ):
        seen.clear()
        close(joined(vae.decode_stream(source, options, frames=range(300, 317))), expected)
        assert source is runs or sum(seen) < 50


def test_tails_of_tiles_can_be_parked(vae, monkeypatch):
    """On a CPU they are copied to other memory of the host, once for each tile and chunk."""
    plan, park, parks, tiles = session.make_plan, Parking.park, [], []
    monkeypatch.setattr(
        session, "make_plan", lambda *args, **given: replace(plan(*args, **given), parked=True)
    )
    monkeypatch.setattr(
        Parking, "park", lambda self, cache: (parks.append(cache), park(self, cache))
    )
    for route in (TiledDecode, TiledEncode):

        def counted(self, x, advance=route.advance):
            tiles.append(len(self.tiles))
            return advance(self, x)

        monkeypatch.setattr(route, "advance", counted)
    latent, frames = latent_for(vae, 3, 96, 128), random_frames(1, 3, 9, 96, 128)
    options = StreamOptions(1, tile=(64, 64))
    for stream, whole, video in (
        (vae.decode_stream, vae.decode, latent),
        (vae.encode_stream, vae.encode, frames),
    ):
        expected = whole(video)
        parks.clear()
        tiles.clear()
        close(joined(stream(video, options)), expected)
        assert min(tiles) > 1
        assert len(parks) == sum(tiles)
