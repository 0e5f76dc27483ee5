"""The node that converts a VAE for ComfyUI-WanVideoWrapper: accepted inputs and errors."""

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, relative_error
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import CPU, Oracle, video, wrapped
from fast_video_vae.tests.wan22 import random_qwen21

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture
def vae(fast):
    return wrapped(fast)


@pytest.mark.parametrize(
    ("videos", "message"),
    [
        (torch.zeros(3, 5, 48, 64), r"videos is \[3, 5, 48, 64\]; expected a tensor \[B, C, T,"),
        ({"samples": 1}, r"videos is a dict; expected a tensor \[B, C, T, H, W\] or a list of"),
        ([torch.zeros(1, 3, 5, 48, 64)], r"videos is a list; expected a tensor \[B, C, T, H, W\]"),
        ([], "videos is empty; expected one video or more"),
        (
            [torch.zeros(3, 5, 48, 64), torch.zeros(3, 9, 48, 64)],
            r"videos\[1\] is \[3, 9, 48, 64\]; expected \[3, 5, 48, 64\], the shape of the first",
        ),
        (torch.zeros(1, 4, 5, 48, 64), "frames has 4 channels; this VAE needs 3"),
        (torch.full((1, 3, 1, 48, 64), torch.nan), "frames"),
    ],
)
def test_invalid_videos_are_a_one_line_error(vae, videos, message):
    with refused(f"^{message}"):
        vae.encode(videos, CPU)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((16, 2, 3, 4), r"hidden_states is \[16, 2, 3, 4\]; expected a tensor \[B, C, T, H, W\]"),
        ((1, 17, 2, 3, 4), "latent has 17 channels; this VAE needs"),
    ],
)
def test_invalid_latents_are_a_one_line_error(vae, shape, message):
    with refused(f"^{message}"):
        vae.decode(torch.zeros(shape), CPU)


def convert(vae):
    from fast_video_vae.nodes.wan_wrapper.nodes import ToWanVideoWrapper

    return ToWanVideoWrapper.execute(vae).args[0]


def test_a_vae_of_comfyui_is_accelerated_and_not_modified(stock, state):
    from fast_video_vae.nodes.vae.comfy_vae import FastVAE

    vae = convert(stock)
    assert not isinstance(stock, FastVAE)
    latent = torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    frames = vae.decode(latent, CPU, end_=False)
    assert relative_error(frames, Oracle(state).decode(latent)) <= 1e-5


def test_a_2x_decoder_and_one_without_an_encoder(state, tmp_path):
    double = random_state_dict(8, out_channels=12)
    vae = convert(fast_vae(double, tmp_path, dtype=torch.float16))
    assert (vae.upsampling_factor, vae.dtype) == (8, torch.float16)
    assert vae.decode(torch.zeros(1, 16, 2, 3, 4).half(), CPU).shape == (1, 3, 5, 48, 64)
    vae = convert(fast_vae(decoder_of(state), tmp_path))
    assert vae.decode(torch.zeros(1, 16, 1, 3, 4), CPU).shape == (1, 3, 1, 24, 32)
    with refused("^the VAE has no encoder; only decoding works with it$"):
        vae.encode(video(1), CPU)


def tiny_vae(_):
    import comfy.sd
    from comfy.taesd.taehv import TAEHV

    return comfy.sd.VAE(sd=TAEHV(16).state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: fast_vae(random_qwen21(), folder),
            "vae: got qwen-image-2.1 with 64 latent channels and 4 image channels",
        ),
        (
            lambda folder: fast_vae(random_state_dict(8, image_channels=4, out_channels=4), folder),
            "vae: got wan2.1 with 16 latent channels and 4 image channels; expected",
        ),
        (tiny_vae, "vae: got a VAE with TAEHV, which cannot be "),
        (lambda _: {}, "vae: got a dict with nothing in it; expected a VAE$"),
    ],
)
def test_an_unsupported_vae_is_a_one_line_error(comfyui, tmp_path, make, message):
    with refused(f"^{message}"):
        convert(make(tmp_path))
