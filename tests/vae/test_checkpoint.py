"""Checkpoints load in every dialect and dtype, or are refused in one line."""

import dataclasses
import math

import pytest
import torch

from fast_video_vae.tests.builders import diffusers_name, one_line, random_state_dict, refused
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.families import STATES, latent_for
from fast_video_vae.tests.wan22 import diffusers_wan22_name, random_qwen21, random_wan22
from fast_video_vae.vae import LayoutError, VideoVAE, build_vae, load_vae, read_checkpoint


@pytest.fixture(scope="module")
def state():
    return random_state_dict(8)


@pytest.fixture(scope="module")
def latent():
    return torch.randn(1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))


DIALECTS = {
    "original": ("wan2.1", str),
    "model.": ("wan2.1", lambda key: f"model.{key}"),
    "first_stage_model.": ("wan2.1", lambda key: f"first_stage_model.{key}"),
    "diffusers": ("wan2.1", diffusers_name),
    "diffusers of Wan 2.2": ("wan2.2", diffusers_wan22_name),
    "diffusers of Qwen-Image 2.1": ("qwen-image-2.1", diffusers_wan22_name),
}


def same_weights(vae, other):
    expected = other.state_dict()
    return vae.state_dict().keys() == expected.keys() and all(
        torch.equal(value, expected[key]) for key, value in vae.state_dict().items()
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_gives_the_same_vae(dialect):
    family, rename = DIALECTS[dialect]
    state = STATES[family]()
    renamed = {rename(key): value for key, value in state.items()}
    if family == "qwen-image-2.1":  # its convolutions are 2D in diffusers
        renamed = {k: v.squeeze(2) if v.ndim == 5 else v for k, v in renamed.items()}
    vae, original = load_vae(renamed), load_vae(state)
    assert vae.config == original.config
    assert same_weights(vae, original)
    assert {name for name, _ in vae.named_parameters()} == set(state)


# Family, channels of latents and frames, scale of the output, compressions, base widths.
LAYOUTS = {
    ("wan2.1", 16, 3, 1, 8, 4, 8, 8): random_state_dict(8),
    ("wan2.1", 16, 3, 1, 8, 4, 24, 24): random_state_dict(24),  # LightVAE
    ("wan2.1", 16, 4, 1, 8, 4, 8, 8): random_state_dict(8, image_channels=4, out_channels=4),
    ("wan2.1", 16, 3, 2, 8, 4, 8, 8): random_state_dict(8, out_channels=12),
    ("wan2.1", 16, 4, 2, 8, 4, 8, 8): random_state_dict(8, image_channels=4, out_channels=16),
    ("wan2.2", 48, 3, 1, 16, 4, 8, 16): random_wan22(8, 16),
    ("qwen-image-2.1", 64, 4, 1, 16, 1, 8, 8): random_qwen21(8, 8),
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


@pytest.mark.parametrize(
    ("encoder_widths", "decoder_widths"),
    [
        ((16, 16, 32, 64, 64), (32, 32, 32, 16, 8)),  # encoder and decoder of different base widths
        ((8, 8, 12, 20, 32), (28, 24, 32, 12, 6)),  # pruned stage by stage
    ],
)
def test_every_stage_has_its_own_width(encoder_widths, decoder_widths, latent):
    reading = dataclasses.replace(
        load_vae(random_state_dict(8)).config,
        encoder_widths=encoder_widths,
        decoder_widths=decoder_widths,
    )
    pruned = VideoVAE(reading, torch.float32, torch.float32).state_dict()
    vae = load_vae({key: torch.randn(value.shape) / 10 for key, value in pruned.items()})
    assert vae.config == reading
    assert vae.decode(latent).shape == (1, 3, 5, 16, 16)
    assert vae.encode(torch.zeros(1, 3, 5, 16, 16)).shape == (1, 16, 2, 2, 2)


@pytest.mark.parametrize("left", [("conv1.",), ()], ids=["with conv1", "without conv1"])
@pytest.mark.parametrize("family", STATES)
def test_a_decoder_checkpoint_decodes_and_cannot_encode(family, left):
    state, kept = STATES[family](), ("decoder.", "conv2.", *left)
    whole = load_vae(state, dtype=torch.float32)
    decoder = {key: value for key, value in state.items() if key.startswith(kept)}
    vae = load_vae(decoder, dtype=torch.float32)
    assert vae.config.encoder_width is None
    latent = latent_for(vae, 2, 32, 32)
    assert torch.equal(vae.decode(latent), whole.decode(latent))
    with refused("no encoder"):
        vae.encode(torch.zeros(1, vae.config.image_channels, 1, 16, 16))


@pytest.mark.parametrize(
    "stored", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_weights_of_any_float_dtype_are_loaded_and_kept(state, latent, stored):
    low = {key: value.to(stored) for key, value in state.items()}
    rounded = load_vae({key: value.float() for key, value in low.items()}, dtype=torch.float32)
    assert same_weights(load_vae(low, dtype=torch.float32), rounded)
    vae = load_vae(state, dtype=torch.float32, weights_dtype=stored)
    assert {parameter.dtype for parameter in vae.parameters()} == {stored}
    if stored != torch.float64:
        assert torch.equal(vae.decode(latent), rounded.decode(latent))
        video = torch.rand(1, 3, 5, 16, 16)
        assert torch.equal(vae.encode(video), rounded.encode(video))


@pytest.mark.parametrize(
    ("arguments", "decodes", "encodes"),
    [
        ({}, (torch.float32, torch.bfloat16), torch.float32),
        (
            {"dtype": torch.bfloat16, "encode_dtype": torch.float32},
            (torch.bfloat16,),
            torch.float32,
        ),
        ({"dtype": torch.float64}, (torch.float64,), torch.float64),
    ],
)
def test_a_dtype_applies_to_both_directions(state, latent, arguments, decodes, encodes):
    vae = load_vae(state, **arguments)
    assert vae.dtype in decodes
    assert vae.decode(latent).dtype == vae.dtype
    assert vae.encode(torch.zeros(1, 3, 1, 8, 8)).dtype == vae.encode_dtype == encodes
    assert {p.dtype for p in vae.decoder.parameters()} == {vae.dtype}
    assert {p.dtype for p in vae.encoder.parameters()} == {encodes}


class _Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "expected a state dict"),
        (torch.ones(3), "expected a state dict"),
        ({"a": 1}, "expected names and tensors"),
        ({1: torch.ones(1)}, "expected names and tensors"),
        ({"weight": _Payload()}, "more than tensors"),
    ],
    ids=["list", "tensor", "number", "key", "code"],
)
def test_a_file_with_other_content_is_refused(tmp_path, content, words):
    path = tmp_path / "vae.pth"
    torch.save(content, path)
    with refused(words, "vae.pth"):
        load_vae(path)


@pytest.mark.parametrize(
    ("keys", "words", "another"),
    [
        (["unet.conv.weight"], ["not a Wan, Qwen-Image or SeedVR2 VAE"], True),
        ([], ["not a Wan", "0 keys"], True),
        (["first_stage_model.decoder.up.0.block.0.conv1.weight"], ["not a Wan"], True),
        (["x"], ["not a Wan"], True),
        (["decoder.middle.0.residual.0.gamma", "decoder.upsamples.0.upsamples.0.residual.2.weight"],
         ["has no decoder.conv1.weight"], False),
        (["decoder.up_blocks.2.upsamplers.0.upscale_conv.weight"],
         ["has no decoder.conv_in.weight"], False),
        (["decoder.middle.0.residual.0.gamma"], ["has no decoder.conv1.weight"], False),
    ],
)  # fmt: skip
def test_only_another_network_is_a_layout_error(keys, words, another):
    with pytest.raises(ValueError, match="state dict") as error:
        load_vae({key: torch.ones(4, 4, 1, 1, 1) for key in keys})
    one_line(error, *words)
    assert isinstance(error.value, LayoutError) is another


ANCHORS = (
    "decoder.conv1.weight", "decoder.upsamples.4.residual.6.weight", "decoder.conv1.bias"
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                **{f"decoder.upsamples.{index}.residual.6.bias": None for index in (0, 1, 5, 6)},
                "decoder.loss.weight": torch.ones(3),
                "decoder.middle.1.proj.weight": torch.ones(32, 31, 1, 1),
            },
            [
                *("fit", "4 missing (decoder.upsamples.0.residual.6.bias and 3 more)"),
                *("1 unexpected", "1 of another shape"),
            ],
        ),
        (
            {"decoder.middle.1.proj.weight": torch.ones(32, 31, 1, 1)},
            ["fit", "decoder.middle.1.proj.weight [32, 31, 1, 1], expected [32, 32, 1, 1]"],
        ),
        *(
            ({key: random_state_dict(8)[key][:5].contiguous()}, ["fit", "1 of another shape", key])
            for key in ANCHORS
        ),
        ({"conv1.bias": torch.zeros(32, dtype=torch.int32)}, ["floating point", "conv1.bias"]),
    ],
)
def test_all_misfits_are_in_one_report(state, changes, words):
    broken = {key: value for key, value in {**state, **changes}.items() if value is not None}
    with refused(*words):
        load_vae(broken)


def test_unknown_layouts_are_refused():
    state = random_wan22(8, 16)
    broken = {key: v for key, v in state.items() if not key.startswith("decoder.upsamples.2.")}
    with refused("the decoder has 3 stages; expected 4 or 5"):
        load_vae(broken)
    with refused("48 channels; expected a multiple of 32"):
        load_vae(random_seedvr2((48, 64, 64, 64)))


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.bfloat16), (math.inf, torch.float8_e5m2)]
)
def test_values_that_are_not_finite_are_refused(state, value, dtype):
    broken = {key: tensor.to(dtype) for key, tensor in state.items()}
    key = "encoder.middle.0.residual.2.bias"
    broken[key] = torch.full_like(state[key], value).to(dtype)
    with refused("NaN or infinity", key):
        load_vae(broken)


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
