"""Videos with all convolutions after a norm in int8: the same bits in chunks, tiles and ranges."""

import copy
import logging
import pickle

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.families import (
    STATES,
    close,
    latent_for,
    prepared,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv as conv_module
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.streaming.int8 import layers as int8_layers

STEP = StreamOptions(1)

pytestmark = pytest.mark.usefixtures("all_int8")


def new_vae(family="wan2.1", dtype=torch.float32, **options):
    return prepared(load_vae(STATES[family](), dtype=dtype, **{"precision": "int8"} | options))


def given(vae, latents=5, size=2):
    """A latent with sides of `size`."""
    side = size * vae.config.spatial_compression
    return latent_for(vae, latents, side, side)


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@each_value_once(
    mode=[torch.enable_grad, torch.inference_mode, torch.no_grad],
    dtype=[torch.float32, torch.float64],  # by the native norm, and by the reference
)
def test_a_video_can_start_in_one_mode_and_end_in_another(mode, dtype):
    vae = new_vae(dtype=dtype)
    latent = given(vae, 3)
    with mode():
        stream = vae.decode_stream(latent.clone(), STEP)
        pieces = [next(stream)]
    assert torch.equal(torch.cat([*pieces, *stream], dim=2), vae.decode(latent, 1))


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
    names = set(vae.state_dict())
    assert names == set(random_state_dict(8))
    for other in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert other.precision == "int8"
        assert not other._int8._known
        products.clear()
        prepared(other)
        assert torch.equal(other.decode(latent), frames)
        assert products
        convs = [each for each in other.modules() if isinstance(each, CausalConv3d)]
        norms = {id(each) for each in other.modules()}
        assert all(each.norm_before is None or id(each.norm_before) in norms for each in convs)


@pytest.mark.parametrize("name", ["residual.2.weight", "residual.0.gamma", "residual.6.bias"])
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
    data = vae.get_parameter(f"decoder.middle.0.{name}").data  # autograd records no change
    data.add_(0.1 * data.flip(0))
    after = prepared(vae).decode(latent)
    assert len(chosen) == 2
    fresh = prepared(load_vae(vae.state_dict(), dtype=torch.float32, precision="int8"))
    assert torch.equal(after, fresh.decode(latent))
    assert not torch.equal(after, before)


def test_several_devices_decode_in_16_bits_and_log_the_reason(caplog, products):
    vae = new_vae()
    latent = given(vae, 2, 4)
    vae.devices = ["cpu", "cpu"]
    frames = vae.decode(latent)
    assert not products
    close(frames, new_vae(precision="auto").decode(latent))
    (line,) = [each for each in warnings_of(caplog) if "int8" in each]
    assert "int8 is not used: " in line
    assert "several devices" in line
    with refused("several devices share the video"):
        vae.int8_layers(torch.float32)
    vae.devices = []
    prepared(vae).decode(latent)
    assert products


def test_wrong_precisions_are_errors_of_one_line():
    state = STATES["wan2.1"]()
    for wish in ("fp8", "int4", "INT8", "", None, 8, torch.int8):
        with refused("^precision is ", "expected auto or int8"):
            load_vae(state, precision=wish)
