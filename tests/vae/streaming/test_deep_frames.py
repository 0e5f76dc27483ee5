"""Frames of 16 bits are encoded as their values in float: in chunks, tiles, bands and shards."""

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.vae.families import STATES, close, joined
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.workspace import to_unit, uint16_as_int16
from fast_video_vae.vae.streaming.static_frames import Changes

STREAMS = {
    "whole": StreamOptions(-1),
    "chunks": StreamOptions(1),
    "tiles": StreamOptions(1, tile=(32, 32)),
}


@pytest.fixture(scope="module")
def vae():
    return load_vae(STATES["wan2.1"](), dtype=torch.float32)


def deep_frames(frames=9, height=48, width=64, seed=0):
    """Frames `[1, 3, T, H, W]` uint16 with the smallest and the largest number."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(65536, (1, 3, frames, height, width), generator=generator)
    found[..., 0, :2] = torch.tensor([0, 65535])
    return found.to(torch.uint16)


def unit(frames):
    """The formula: [-1, 1] in float64."""
    return frames.double() / 65535 * 2 - 1


def test_every_number_is_converted_within_half_a_rounding():
    frames = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(1, 1, 1, 256, 256)
    before = frames.clone()
    found = to_unit(uint16_as_int16(frames))
    assert found.dtype == torch.float32
    assert torch.equal(found, unit(frames).float())
    assert torch.equal(uint16_as_int16(frames), uint16_as_int16(before))  # the pixels of the caller


@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("layout", ["dense", "images", "pieces"])
def test_a_stream_of_16_bits_equals_that_of_its_values(vae, options, layout):
    frames = deep_frames()
    expected = joined(vae.encode_stream(unit(frames).float(), options))
    if layout == "images":
        frames = frames.permute(0, 2, 3, 4, 1).contiguous().movedim(-1, 1)
    source = iter(frames.split(2, dim=2)) if layout == "pieces" else frames
    close(joined(vae.encode_stream(source, options)), expected)


def test_an_encode_of_257_times_the_bytes_equals_that_of_the_bytes(vae):
    small = (deep_frames().int() >> 8).to(torch.uint8)
    deep = (small.int() * 257).to(torch.uint16)
    close(vae.encode(deep), vae.encode(small))
    close(vae.encode(deep[:, :, :1]), vae.encode(small[:, :, :1]))


def test_devices_share_frames_of_16_bits():
    vae = load_vae(STATES["wan2.1"](), dtype=torch.float32)
    frames = deep_frames(9, 96, 160)
    expected = vae.encode(frames)
    close(expected, vae.encode(unit(frames).float()))
    vae.devices = ["cpu"] * 2
    assert torch.equal(vae.encode(frames), expected)


def test_static_frames_of_16_bits_are_recognised(vae):
    frames = deep_frames(45)
    frames[:, :, 2:] = frames[:, :, 1:2]
    close(
        joined(vae.encode_stream(frames, StreamOptions(1))),
        joined(vae.encode_stream(unit(frames).float(), StreamOptions(1))),
    )
    assert Changes().repeats(uint16_as_int16(frames)) == 44
    frames[0, 0, -1, 5, 5] = int(frames[0, 0, -1, 5, 5]) ^ 1  # the lowest bit of one number
    assert Changes().repeats(uint16_as_int16(frames)) == 1


def test_16_bits_reach_a_computation_in_bfloat16(vae):
    frames = deep_frames()
    options = StreamOptions(1, dtype=torch.bfloat16)
    expected = joined(vae.encode_stream(unit(frames).float(), options))
    assert torch.equal(joined(vae.encode_stream(frames, options)), expected)


def test_the_error_for_other_numbers_names_both(vae):
    with refused("frames are int16; expected a float dtype in .*, uint8 or uint16"):
        vae.encode(deep_frames().view(torch.int16))
