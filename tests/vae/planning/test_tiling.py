"""Tiles give the result of whole frames for any tile size, without seams."""

from dataclasses import replace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, WAN, close, joined, latent_for, random_frames
from fast_video_vae.tests.wan22 import random_wan22
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.models.receptive_field import frame_sizes
from fast_video_vae.vae.planning import candidates, tiling
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.streaming.cache_offload import Parking
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode, TiledEncode


@pytest.fixture(scope="module", params=WAN)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


@pytest.fixture
def tiles(monkeypatch):
    """Number of tiles of each chunk."""
    counts = []
    for route in (TiledDecode, TiledEncode):
        advance = route.advance

        def counted(self, x, advance=advance):
            counts.append(len(self.tiles))
            return advance(self, x)

        monkeypatch.setattr(route, "advance", counted)
    return counts


# Height and width of the frames, of a tile, latents, chunk, batch.
CASES = [
    (128, 192, (64, 64), 3, 1, 1),
    (144, 176, (64, 64), 3, 2, 1),  # odd numbers of latents
    (144, 112, (72, 10_000), 3, -1, 1),  # tiles as wide as the frames
    (96, 160, (50, 70), 2, None, 2),  # tiles that do not divide the frames
    (96, 128, (64, 64), 1, None, 1),  # one frame
]


@pytest.mark.parametrize(("height", "width", "tile", "frames", "chunk", "batch"), CASES)
def test_tiles_give_the_result_of_whole_frames(
    vae, tiles, height, width, tile, frames, chunk, batch
):
    options = StreamOptions(chunk, tile=tile)
    latent = latent_for(vae, frames, height, width, batch)
    video = random_frames(batch, 3, 4 * frames - 3, height, width)
    decoded, encoded = vae.decode(latent), vae.encode(video)
    assert not tiles
    close(joined(vae.encode_stream(video, options)), encoded)
    close(joined(vae.decode_stream(latent, options)), decoded)
    assert min(tiles) > 1


def test_every_cut_gives_the_same_result(vae, monkeypatch, tiles):
    latent, video = latent_for(vae, 3, 96, 128), random_frames(1, 3, 9, 96, 128)
    frames, encoded = vae.decode(latent), vae.encode(video)
    find = tiling.can_cut
    counts = [len(find(network)) for network in (vae.decoder, vae.encoder)]
    assert min(counts) >= 3
    for index in range(max(counts)):
        monkeypatch.setattr(
            candidates,
            "can_cut",
            lambda network, index=index: find(network)[index : index + 1] or find(network)[:1],
        )
        close(joined(vae.decode_stream(latent, StreamOptions(tile=(64, 64)))), frames)
        close(joined(vae.encode_stream(video, StreamOptions(tile=(64, 64)))), encoded)
    assert min(tiles) > 1


def test_brightness_is_continuous_at_tile_and_chunk_borders(vae):
    """A slow ramp in space and time, compared in float64, in which a seam would be visible."""
    height, width, frames = 128, 128, 5
    step = vae.config.spatial_compression
    y, x = torch.meshgrid(
        torch.linspace(-1, 1, height // step), torch.linspace(-1, 1, width // step), indexing="ij"
    )
    times = torch.linspace(0, 0.5, frames).view(-1, 1, 1)
    latent = (y + x + times).expand(1, vae.config.latent_channels, -1, -1, -1)
    whole = vae.decode(latent).double()
    cut = joined(vae.decode_stream(latent, StreamOptions(1, tile=(64, 64)))).double()
    scale = whole.abs().max()
    means = [video.mean(dim=(1, 3, 4)).squeeze(0) for video in (whole, cut)]
    assert (means[1].diff() - means[0].diff()).abs().max() < 1e-6 * scale
    for dim in (3, 4):
        assert (cut.diff(dim=dim) - whole.diff(dim=dim)).abs().max() < 1e-5 * scale


def test_layers_that_see_whole_frames_are_not_tiled():
    seedvr2 = load_vae(random_seedvr2(), dtype=torch.float32)
    assert not tiling.can_cut(seedvr2.decoder)
    assert not tiling.can_cut(seedvr2.encoder)
    latent = torch.randn(1, 16, 2, 8, 8)
    close(
        joined(seedvr2.decode_stream(latent, StreamOptions(tile=(32, 32)))), seedvr2.decode(latent)
    )


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


@pytest.mark.parametrize("chunk", [1, 2, -1])
def test_a_static_end_is_skipped_in_tiles(vae, tiles, chunk):
    video = random_frames(1, 3, 1, 64, 96).repeat(1, 1, 121, 1, 1)
    video[:, :, :7] = random_frames(1, 3, 7, 64, 96)
    vae.skips_static = False
    expected = vae.encode(video)
    vae.skips_static = True
    close(joined(vae.encode_stream(video, StreamOptions(chunk, tile=(32, 48)))), expected)
    assert tiles


def test_tails_of_tiles_can_be_parked(vae, tiles, monkeypatch):
    """On a CPU they are copied to other memory of the host."""
    plan, parks = session.make_plan, []

    def parked(*arguments, **options):
        return replace(plan(*arguments, **options), parked=True)

    monkeypatch.setattr(session, "make_plan", parked)
    park = Parking.park
    monkeypatch.setattr(
        Parking, "park", lambda self, cache: (parks.append(cache), park(self, cache))
    )
    latent, frames = latent_for(vae, 3, 96, 128), random_frames(1, 3, 9, 96, 128)
    close(joined(vae.decode_stream(latent, StreamOptions(1, tile=(64, 64)))), vae.decode(latent))
    close(joined(vae.encode_stream(frames, StreamOptions(1, tile=(64, 64)))), vae.encode(frames))
    assert tiles
    assert len(parks) == sum(tiles)
