"""No frames are padded over time by `F.pad`, which is wrong on Apple's GPUs.

There, constant, reflecting and replicating pads of the third dimension of five give wrong values
from 65,536 pixels on. Pads of rows and columns are right.
"""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.tests.vae.families import (
    STATES,
    WAN,
    close,
    joined,
    latent_for,
    prepared,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import row_bands
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.preview import load_tiny_decoder
from fast_video_vae.vae.streaming import session

# In inference mode a pad is not taken apart before it is seen.
PADS = ("pad", "_pad", "constant_pad", "reflection_pad", "replication_pad")

SIDE = 8  # of a latent


class Pads(TorchDispatchMode):
    """Keeps the pads over time, or over the dimensions before it, of five-dimensional tensors."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        padded = name.startswith(PADS) and isinstance(args[0], torch.Tensor)
        if padded and args[0].ndim == 5 and any(args[1][4:]):
            self.seen.append((name, list(args[1])))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pads(monkeypatch):
    """The pads over time in this thread and in new ones."""
    seen, run = [], threading.Thread.run

    def watched(thread):
        with Pads(seen):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", watched)
    with Pads(seen):
        yield seen


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_a_pad_over_time_is_seen_and_one_over_rows_is_not(pads, mode, elsewhere, inference):
    x = torch.zeros(1, 2, 3, 4, 5)

    def pad():
        with torch.inference_mode(inference):
            F.pad(x, (1, 1, 2, 0, 0, 0), mode)
            F.pad(x[0], (0, 0, 1, 1), "constant")
            assert not pads
            F.pad(x, (0, 0, 0, 0, 1, 0), mode)

    if elsewhere:
        thread = threading.Thread(target=pad)
        thread.start()
        thread.join()
    else:
        pad()
    assert len(pads) == 1


def used(vae, latent, video, options):
    """Decode and encode a whole, and pieces."""
    joined(vae.decode_stream(latent, options))
    joined(vae.decode_stream(iter(latent.split(1, dim=2)), options))
    joined(vae.encode_stream(video, options))
    joined(vae.encode_stream(iter(video.split(2, dim=2)), options))


def inputs(vae, latents):
    side = SIDE * vae.config.spatial_compression
    frames = vae.config.frames(latents)
    video = random_frames(1, vae.config.image_channels, frames, side, side)
    return latent_for(vae, latents, side, side), video


@pytest.fixture
def parts(monkeypatch):
    """Layers compute their frames in parts, of a few rows each."""
    make = session.make_plan
    small = lambda *args, **given: replace(make(*args, **given), part_bytes=1 << 12)  # noqa: E731
    monkeypatch.setattr(session, "make_plan", small)


@pytest.fixture(params=STATES)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


def test_no_step_pads_over_time(vae, pads):
    for latents, chunk in ((1, 1), (3, 1), (3, -1)):
        used(vae, *inputs(vae, latents), StreamOptions(chunk))
    assert pads == []


@pytest.mark.parametrize("family", WAN)
@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_no_band_of_a_layer_that_ran_out_of_memory_pads_over_time(
    family, precision, pads, all_int8, monkeypatch
):
    convolve, banded = CausalConv3d.convolve, []

    def short(conv, x, *arguments):
        if x.shape[3] > 20:
            raise torch.OutOfMemoryError("no memory")
        return convolve(conv, x, *arguments)

    def counted(*arguments, convolve=row_bands.convolve):
        banded.append(arguments)
        return convolve(*arguments)

    vae = prepared(load_vae(STATES[family](), dtype=torch.float32, precision=precision))
    latent, video = inputs(vae, 2)
    frames, means = vae.decode(latent), vae.encode(video)
    monkeypatch.setattr(CausalConv3d, "convolve", short)
    monkeypatch.setattr(row_bands, "convolve", counted)
    close(vae.decode(latent, 1), frames)
    assert banded
    banded.clear()
    close(vae.encode(video, 1), means)
    assert banded
    assert pads == []


def test_no_part_of_a_layer_pads_over_time(vae, pads, parts):
    used(vae, *inputs(vae, 2), StreamOptions(1))
    assert pads == []


def test_no_range_and_no_image_pads_over_time(vae, pads):
    latent, video = inputs(vae, 2)
    _, channels, frames, height, width = vae.config.decoded_shape(latent.shape)
    images = torch.empty(1, frames, height, width, channels, dtype=torch.uint8)
    for _ in vae.decode_stream(latent, StreamOptions(1), images=images):
        pass
    joined(vae.decode_stream(latent, StreamOptions(1), frames=range(1, frames)))
    eight = ((video + 1) * 127).to(torch.uint8)
    joined(vae.encode_stream(eight, StreamOptions(1)))
    assert pads == []


@pytest.mark.parametrize("family", WAN)
def test_no_tile_and_no_band_pads_over_time(family, pads, steady):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    latent, video = inputs(vae, 2)
    step = 4 * vae.config.spatial_compression
    used(vae, latent, video, StreamOptions(1, tile=(step, step)))
    vae.devices = ["cpu"] * 2
    used(vae, latent, video, StreamOptions(1))
    assert pads == []


@pytest.mark.parametrize("family", STATES)
def test_no_code_pads_over_time(family, pads, all_int8, parts):
    vae = prepared(load_vae(STATES[family](), dtype=torch.float32, precision="int8"))
    joined(vae.decode_stream(inputs(vae, 2)[0], StreamOptions(1)))
    assert pads == []


def test_no_tiny_decoder_pads_over_time(pads, tmp_path):
    path = tmp_path / "lighttaew2_1.safetensors"
    save_file(random_tiny(), path)
    decoder = load_tiny_decoder(path, dtype=torch.float32)
    for chunk in (1, -1):
        decoder.decode(torch.zeros(1, 16, 3, 4, 4), chunk)
    assert pads == []
