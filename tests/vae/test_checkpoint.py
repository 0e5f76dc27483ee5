"""A VAE has the configuration of its weights, and the dtypes that the caller names."""

import dataclasses

import pytest
import torch

from fast_video_vae.tests.builders import one_line, random_state_dict, refused
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, latent_for
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import LayoutError, VideoVAE, build_vae, load_vae, read_checkpoint


@pytest.fixture(scope="module")
def state():
    return random_state_dict(8)


@pytest.fixture(scope="module")
def latent():
    return torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))


# Family, channels of latents and frames, scale of the output, compressions, base widths.
LAYOUTS = {
    ("wan2.1", 16, 3, 1, 8, 4, 8, 8): random_state_dict(8),
    ("wan2.1", 16, 4, 1, 8, 4, 6, 6): random_state_dict(6, image_channels=4, out_channels=4),
    ("wan2.1", 16, 3, 2, 8, 4, 8, 8): random_state_dict(8, out_channels=12),
    ("wan2.1", 16, 4, 2, 8, 4, 8, 8): random_state_dict(8, image_channels=4, out_channels=16),
    ("wan2.2", 48, 3, 1, 16, 4, 8, 16): random_wan22(8, 16),  # of different base widths
    ("qwen-image-2.1", 64, 4, 1, 16, 1, 8, 8): random_qwen21(),
    ("seedvr2", 16, 3, 1, 8, 4, 32, 32): random_seedvr2((32, 32, 64, 64)),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_configuration_is_read_from_the_weights(layout):
    config = load_vae(LAYOUTS[layout]).config
    assert layout == (
        *(config.family, config.latent_channels, config.image_channels, config.output_scale),
        *(config.spatial_compression, config.temporal_compression),
        *(config.encoder_width, config.decoder_width),
    )
    if config.family == "seedvr2":
        assert config.encoder_widths == (32, 32, 32, 64, 64)
        assert config.decoder_widths == (64, 64, 64, 32, 32)
    assert len(config.latent_mean) == len(config.latent_std) == config.latent_channels


def test_the_standard_vae_of_a_layout_is_the_published_one():
    narrow = read_checkpoint(LAYOUTS["wan2.1", 16, 3, 2, 8, 4, 8, 8]).config
    assert narrow.standard() == read_checkpoint(random_state_dict(8)).config
    wan22 = read_checkpoint(random_wan22(8, 16)).config.standard()
    assert wan22.encoder_widths == (160, 160, 320, 640, 640)
    assert wan22.decoder_widths == (1024, 1024, 1024, 512, 256)
    assert (wan22.latent_channels, wan22.patch_size, wan22.image_channels) == (48, 2, 3)
    seedvr2 = read_checkpoint(random_seedvr2((32, 32, 64, 64))).config.standard()
    assert seedvr2.encoder_widths == (128, 128, 256, 512, 512)
    assert seedvr2.decoder_widths == (512, 512, 512, 256, 128)


def test_every_stage_has_its_own_width(state, latent):
    widths = {"encoder_widths": (8, 8, 12, 20, 32), "decoder_widths": (28, 24, 32, 12, 6)}
    reading = dataclasses.replace(read_checkpoint(state).config, **widths)
    pruned = VideoVAE(reading, torch.float32, torch.float32).state_dict()
    vae = load_vae({key: torch.randn(value.shape) / 10 for key, value in pruned.items()})
    assert vae.config == reading
    assert vae.decode(latent).shape == (1, 3, 5, 16, 16)
    assert vae.encode(torch.zeros(1, 3, 5, 16, 16)).shape == (1, 16, 2, 2, 2)


@pytest.mark.parametrize(
    ("family", "left"), [("wan2.1", ("conv1.",)), ("wan2.2", ()), ("seedvr2", ())]
)
def test_a_decoder_checkpoint_decodes_and_cannot_encode(family, left):
    state, kept = STATES[family](), ("decoder.", "conv2.", *left)
    whole = load_vae(state, dtype=torch.float32)
    decoder = {key: value for key, value in state.items() if key.startswith(kept)}
    vae = load_vae(decoder, dtype=torch.float32)
    assert vae.config.encoder_width is None
    latent = latent_for(vae, 2, 16, 16)
    assert torch.equal(vae.decode(latent), whole.decode(latent))
    with refused("no encoder"):
        vae.encode(torch.zeros(1, vae.config.image_channels, 1, 16, 16))


@pytest.mark.parametrize("stored", [torch.float64, torch.float8_e5m2])
def test_weights_of_any_float_dtype_are_loaded_and_kept(state, latent, stored):
    low = {key: value.to(stored) for key, value in state.items()}
    rounded = load_vae({key: value.float() for key, value in low.items()}, dtype=torch.float32)
    loaded = load_vae(low, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in rounded.state_dict().items())
    vae = load_vae(state, dtype=torch.float32, weights_dtype=stored)
    assert {parameter.dtype for parameter in vae.parameters()} == {stored}
    if stored != torch.float64:
        assert torch.equal(vae.decode(latent), rounded.decode(latent))
        video = torch.rand(1, 3, 5, 16, 16)
        assert torch.equal(vae.encode(video), rounded.encode(video))


@pytest.mark.parametrize(
    ("arguments", "decodes", "encodes"),
    [
        ({}, [torch.float32, torch.bfloat16], torch.float32),
        ({"dtype": torch.bfloat16, "encode_dtype": torch.float32}, [torch.bfloat16], torch.float32),
        ({"dtype": torch.float64}, [torch.float64], torch.float64),
    ],
)
def test_a_dtype_applies_to_both_directions(state, latent, arguments, decodes, encodes):
    vae = load_vae(state, **arguments)
    assert vae.dtype in decodes
    assert vae.decode(latent).dtype == vae.dtype
    assert vae.encode(torch.zeros(1, 3, 1, 8, 8)).dtype == vae.encode_dtype == encodes
    assert {p.dtype for p in vae.decoder.parameters()} == {vae.dtype}
    assert {p.dtype for p in vae.encoder.parameters()} == {encodes}


@pytest.mark.parametrize(
    ("keys", "words", "another"),
    [
        ([], ["not a Wan", "0 keys"], True),
        (["first_stage_model.decoder.up.0.block.0.conv1.weight"], ["not a Wan"], True),
        (["decoder.middle.0.residual.0.gamma", "decoder.upsamples.0.upsamples.0.residual.2.weight"],
         ["has no decoder.conv1.weight"], False),
        (["decoder.up_blocks.2.upsamplers.0.upscale_conv.weight"],
         ["has no decoder.conv_in.weight"], False),
    ],
)  # fmt: skip
def test_only_another_network_is_a_layout_error(keys, words, another):
    with pytest.raises(ValueError, match="state dict") as error:
        load_vae({key: torch.ones(4, 4, 1, 1, 1) for key in keys})
    one_line(error, *words)
    assert isinstance(error.value, LayoutError) is another


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": torch.int8}, {"encode_dtype": torch.float8_e4m3fn}, {"weights_dtype": torch.int32}],
)
def test_other_dtypes_are_refused(state, arguments):
    with refused("expected", *arguments):
        load_vae(state, **arguments)


def test_weights_share_the_memory_of_the_source_where_possible():
    state = random_state_dict(4)
    key, gaps = "decoder.conv1.weight", torch.zeros(16, 16, 3, 3, 6)[..., ::2]
    state[key] = gaps.copy_(state[key])
    shared = build_vae(
        read_checkpoint(state),
        device=torch.device("cpu"),
        dtype=torch.float32,
        encode_dtype=torch.bfloat16,
        share=True,
    )
    for name, parameter in shared.named_parameters():
        same = parameter.data_ptr() == state[name].data_ptr()
        encodes = name.startswith(("encoder.", "conv1."))
        assert same == (name != key and not encodes), name
    copied, latent = load_vae(state, dtype=torch.float32), torch.randn(1, 16, 2, 4, 4)
    own = dict(copied.named_parameters())
    assert all(own[name].data_ptr() != value.data_ptr() for name, value in state.items())
    assert torch.equal(shared.decode(latent), copied.decode(latent))
