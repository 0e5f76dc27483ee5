"""Videos with all convolutions after a norm in int8: the same bits in chunks, tiles and ranges."""

import copy
import logging
import pickle

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.vae.families import (
    STATES,
    close,
    computes_16_bits,
    joined,
    latent_for,
    prepared,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv as conv_module
from fast_video_vae.vae.layers.inputs import coding
from fast_video_vae.vae.streaming import session as session_module
from fast_video_vae.vae.streaming.bands.team import Team
from fast_video_vae.vae.streaming.int8 import layers as int8_layers
from fast_video_vae.vae.streaming.int8 import settings

STEP = StreamOptions(1)

pytestmark = pytest.mark.usefixtures("all_int8")


def new_vae(family="wan2.1", dtype=torch.float32, **options):
    return prepared(load_vae(STATES[family](), dtype=dtype, **{"precision": "int8"} | options))


def given(vae, latents=4, size=2):
    """A latent with sides of `size`."""
    side = size * vae.config.spatial_compression
    return latent_for(vae, latents, side, side)


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(("family", "dtype"), [("wan2.2", "float32"), ("seedvr2", "bfloat16")])
def test_chunks_ranges_and_a_single_frame_have_the_bits_of_the_whole(
    family, dtype, products, monkeypatch
):
    computes_16_bits(monkeypatch)
    vae = new_vae(family, getattr(torch, dtype))
    latent = given(vae)
    frames = vae.decode(latent, -1)
    assert products
    pieces = iter(latent.split([2, 1, 1], dim=2))
    for chunk, source in ((1, latent), (2, pieces)):
        assert torch.equal(joined(vae.decode_stream(source, StreamOptions(chunk))), frames)
    assert torch.equal(vae.decode(latent[:, :, :1]), frames[:, :, :1])
    end = frames.shape[2]
    some = joined(vae.decode_stream(latent, STEP, frames=range(end - 2, end)))
    assert torch.equal(some, frames[:, :, -2:])


def test_steps_in_parts_and_bands_have_the_bits_of_whole_frames(monkeypatch):
    vae = new_vae("seedvr2")
    latent = given(vae, 3)
    frames = vae.decode(latent)
    real = session_module.make_plan

    def small(*arguments, **options):
        plan = real(*arguments, **options)
        object.__setattr__(plan, "part_bytes", 4096)
        return plan

    monkeypatch.setattr(session_module, "make_plan", small)
    assert torch.equal(vae.decode(latent, -1), frames)


def test_tiles_have_the_bits_of_whole_frames(products):
    vae = new_vae()
    latent = given(vae, 3, 8)
    step = 4 * vae.config.spatial_compression
    options = StreamOptions(1, tile=(step, step))
    frames = vae.decode(latent)
    whole = len(products)
    tiled = joined(vae.decode_stream(latent, options))
    assert len(products) > 2 * whole
    assert torch.equal(tiled, frames)


def test_auto_and_encodes_never_ask_for_int8(monkeypatch):
    def fails(*_, **__):
        raise AssertionError("int8 was asked for")

    vae = new_vae(precision="auto")
    latent, video = given(vae, 3), random_frames(1, 3, 9, 16, 16)
    monkeypatch.setattr(conv_module, "int8_conv3d", fails)
    monkeypatch.setattr(int8_layers, "choose", fails)
    plain = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    assert plain.precision == "auto"
    assert torch.equal(vae.decode(latent), plain.decode(latent))
    vae.precision = "int8"
    assert torch.equal(vae.encode(video), plain.encode(video))


def test_copies_keep_the_precision_and_choose_for_themselves(products):
    vae = new_vae()
    latent = given(vae, 3)
    frames = vae.decode(latent)
    assert vae.state_dict().keys() == random_state_dict(8).keys()
    for other in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert other.precision == "int8"
        assert not other._int8._known
        products.clear()
        prepared(other)
        assert torch.equal(other.decode(latent), frames)
        assert products


@pytest.mark.parametrize("name", ["residual.2.weight", "residual.0.gamma"])
def test_changed_weights_have_other_codes_and_another_choice(name, monkeypatch):
    chosen, choose = [], int8_layers.choose

    def counted(*arguments):
        chosen.append(arguments)
        return choose(*arguments)

    monkeypatch.setattr(int8_layers, "choose", counted)
    vae = new_vae()
    latent = given(vae, 2)
    before = vae.decode(latent)
    assert torch.equal(vae.decode(latent), before)
    assert len(chosen) == 1
    data = vae.get_parameter(f"decoder.middle.0.{name}").data
    data.add_(0.1 * data.flip(0))
    after = prepared(vae).decode(latent)
    assert len(chosen) == 2
    fresh = prepared(load_vae(vae.state_dict(), dtype=torch.float32, precision="int8"))
    assert torch.equal(after, fresh.decode(latent))
    assert not torch.equal(after, before)


def test_several_devices_decode_in_int8_if_each_can(monkeypatch, caplog, products):
    vae = prepared(new_vae())
    latent = given(vae, 2, 4)
    expected, count = vae.decode(latent), len(products)
    vae.devices = ["cpu", "cpu"]
    close(vae.decode(latent), expected)
    assert len(products) > 2 * count
    lacking = iter(["", "it is too old"])
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: next(lacking))
    vae.team = Team(vae.replicas, [torch.device("cpu"), torch.device("cpu", 0)])
    close(vae.decode(latent), new_vae(precision="auto").decode(latent))
    (line,) = [each for each in warnings_of(caplog) if "int8" in each]
    assert "int8 is not used: it is too old" in line


def test_wrong_precisions_are_errors_of_one_line():
    state = STATES["wan2.1"]()
    for wish in ("fp8", "INT8", None):
        with refused("^precision is ", "expected auto or int8"):
            load_vae(state, precision=wish)


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


@pytest.mark.parametrize(("bright", "source"), [(0, "tensor"), (3, "uneven pieces")])
def test_a_decode_out_of_range_continues_in_16_bits(bright, source, caplog, products, exposed):
    vae = exposed
    latent = given(vae, 6)
    plain = vae.decode(latent, 1)
    assert not warnings_of(caplog)
    latent[:, :, bright] = 1e4 * latent[:, :, 3]  # of a sign that saturates
    at = vae.config.frames(bright) if bright else 0
    other = copy.deepcopy(vae)
    other.precision = "auto"
    expected = torch.cat([plain[:, :, :at], other.decode(latent, 1)[:, :, at:]], dim=2)
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
