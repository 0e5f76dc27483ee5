"""How far back a frame or a latent depends on what the network was given."""

import pytest
import torch

from fast_video_vae.tests.vae.families import STATES, random_frames
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers.conv import Conv
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.models.executor import Executor
from fast_video_vae.vae.models.receptive_field import frames_before, latents_before

START = 2  # latents before the stream that starts in the middle


@torch.no_grad()
def streamed(network, x, group, *, first):
    """The results of one latent after the other; `group` inputs belong to each."""
    cache = TemporalCache()
    cache.first = first
    executor, results = Executor(network.chains(), cache, 1 << 40), []
    for chunk in x.split([1] * first + [group] * ((x.shape[2] - first) // group), dim=2):
        run = chunk.clone(memory_format=torch.channels_last_3d)
        results.append(torch.cat(list(executor.advance(run)), dim=2))
        cache.first = False
    return results


@pytest.mark.parametrize(("family", "encode"), [("wan2.1", False), ("wan2.2", True)])
def test_a_stream_can_start_in_the_middle(family, encode):
    """Results are the same bits after the receptive field, and not one latent earlier."""
    # In half of these digits the influence of the earliest latent is not seen.
    vae = load_vae(STATES[family](), dtype=torch.float64, encode_dtype=torch.float64)
    network = vae.encoder if encode else vae.decoder
    group = 4 if encode else 1
    before = frames_before(network.layers()) if encode else latents_before(network)
    assert before % group == 0
    before //= group
    channels = next(each for each in network.modules() if isinstance(each, Conv)).weight.shape[1]
    side = 16 if encode else 2
    x = random_frames(1, channels, 1 + group * (START + before + 1), side, side // 2).double()
    whole = streamed(network, x, group, first=True)
    late = streamed(network, x[:, :, 1 + group * START :], group, first=False)
    expected = whole[1 + START :]
    assert all(map(torch.equal, late[before:], expected[before:]))
    assert not torch.equal(late[before - 1], expected[before - 1])
