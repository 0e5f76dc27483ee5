"""Latents and images that the nodes refuse, and sizes that a model cuts: what the user reads."""

import functools
import re

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, node, ours, v3_node
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import wrapped
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.streaming.fake_gpu import OfGPU
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import model
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.validation import check_frames

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

FROM = r" \(from 0\), made by a sampler or node, not the VAE$"
CPU = torch.device("cpu")


def shown(vae, samples):
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    return PreviewLatent.PREPARE_CLASS_CLONE(None).execute(samples={"samples": samples})


def tiled(vae, samples):
    return node("VAEDecodeTiled", vae, {"samples": samples}, 64, 16, 8, 4)


# The name of the input before an error, and the way of a latent.
WAYS = {
    "Decode": ("samples: ", lambda vae, x: ours("Decode", vae=vae, samples={"samples": x})),
    "DecodeVideo": (
        "samples: ",
        lambda vae, x: ours("DecodeVideo", vae=vae, samples={"samples": x}),
    ),
    "Preview": ("samples: ", shown),
    "VAE Decode": ("", lambda vae, x: node("VAEDecode", vae=vae, samples={"samples": x})),
    "VAE Decode (Tiled)": ("", tiled),
    "WANVAE": ("", lambda vae, x: wrapped(vae).decode(x, CPU)),
    "WANVAE, a list": ("", lambda vae, x: wrapped(vae).decode(list(x), CPU)),
}


def spoiled(x, *places):
    for video, frame in places:
        x[video, 3, frame, 1, 1] = torch.nan
    return x


@pytest.mark.parametrize("way", WAYS)
def test_every_way_names_the_first_bad_latent_frame(fast, approx, way):
    name, take = WAYS[way]
    start = f"^{name}latent has . values that are NaN or infinite; expected none: latent frame "
    with refused(f"{start}3 of 5{FROM}"):
        take(fast, spoiled(latents(5), (0, 3), (0, 4)))
    # The wrapper has videos one by one.
    place = "4 of 5" if "WANVAE" in way else "3 of 5, video 1 of 2"
    with refused(f"{start}{place}{FROM}"):
        take(fast, spoiled(latents(5, batch=2), (1, 3), (0, 4)))


def test_another_vae_and_the_sampler_refuse_it_with_the_same_words(stock):
    from fast_video_vae.nodes.host.input_types import TYPES

    with refused(f"^samples: .* latent frame 3 of 5{FROM}"):
        WAYS["Decode"][1](stock, spoiled(latents(5), (0, 3)))
    sound = torch.full((1, 64, 20), torch.inf)
    with refused("^latent has 1280 values that are NaN or infinite"):
        TYPES["LATENT"]({"samples": sound})


@pytest.fixture
def gpu(monkeypatch):
    """Give a function that makes the next `times` checks of frames skip the values, as on a GPU."""
    monkeypatch.setattr(session, "Upload", OfGPU)
    return lambda times: monkeypatch.setattr(model, "check_frames", unchecked(times))


def unchecked(times):
    """Return a `check_frames` whose first `times` calls skip the values."""
    left = iter(range(times))

    def check(*given, values):
        return check_frames(*given, values=values and next(left, None) is None)

    return check


def images_of(count, *places):
    pixels = clip(count, 16, 16)
    for place in places:
        pixels[place, 3, 3] = torch.inf
    return pixels


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("batch", "place"), [("video", "6 of 9"), ("images", "0 of 1, video 6 of 9")]
)
def test_every_encode_names_the_first_bad_frame(fast, gpu, on_gpu, batch, place):
    if on_gpu:  # one look at all, then one at each video up to the bad one
        gpu(1 + (7 if batch == "images" else 1))
    with refused(
        r"^pixels: frames has 6 values that are NaN or infinite; expected none: frame "
        rf"{place} \(from 0\), made by another node, not the VAE$"
    ):
        ours("Encode", vae=fast, pixels=images_of(9, 6, 8), batch=batch, chunk=1)


def test_a_video_of_images_has_the_number_of_the_frame(fast):
    (video,) = v3_node("nodes_video", "CreateVideo", images=images_of(9, 6, 8), fps=12.0)
    with refused(r"^video: frames has 6 values .* frame 6 \(from 0\), made by another node"):
        ours("EncodeVideo", vae=fast, video=video)


def test_the_wrapper_names_the_frame(fast):
    videos = torch.stack([images_of(9), images_of(9, 8)]).movedim(-1, 1)
    for given in (videos, list(videos)):
        with refused(r"^frames has 3 values .* frame 8 of 9 \(from 0\), made by another node"):
            wrapped(fast).encode(given, CPU, end_=True)


STATES = {
    "wan2.1": lambda: random_state_dict(8),
    "wan2.2": lambda: random_wan22(8, 8),
    "seedvr2": random_seedvr2,
    "qwen-image-2.1": random_qwen21,
}
MAKERS = {
    "wan2.1": "EmptyHunyuanLatentVideo",
    "wan2.2": "Wan22ImageToVideoLatent",
    "seedvr2": "VAE Encode (Fast)",
    "qwen-image-2.1": "VAE Encode (Fast)",
}
MODELS = {16: "Wan 2.1, 2.2 14B, Qwen-Image, SeedVR2", 48: "Wan 2.2 5B", 64: "Qwen-Image 2.1"}


@pytest.fixture(scope="module")
def vae_of(comfyui, tmp_path_factory):
    return functools.cache(lambda name: fast_vae(STATES[name](), tmp_path_factory.mktemp("vae")))


@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize("channels", [4, 12, 16, 48, 64, 128])
def test_a_latent_of_another_model_names_both_and_the_nodes_to_use(vae_of, family, channels):
    vae = vae_of(family)
    needed = vae.latent_channels
    if channels == needed:
        return
    load = f"Load VAE (Fast) for {MODELS[channels]}, or " if channels in MODELS else ""
    error = (
        f"latent has {channels} channels; this VAE needs {needed}: use {load}{MAKERS[family]} for "
        f"{MODELS[needed]}"
    )
    for way in ("Decode", "DecodeVideo", "VAE Decode", "VAE Decode (Tiled)"):
        name, take = WAYS[way]
        with refused(f"^{re.escape(name + error)}$"):
            take(vae, latents(1, channels=channels))


def test_the_nodes_that_an_error_names_make_such_latents(comfyui, vae_of):
    from fast_video_vae.nodes.vae.first_stage import _MAKERS

    empty = {"width": 64, "height": 64, "length": 5, "batch_size": 1}
    for family, module in (("wan2.1", "nodes_hunyuan"), ("wan2.2", "nodes_wan")):
        vae = vae_of(family)
        given = empty | ({"vae": vae} if family == "wan2.2" else {})
        (made,) = v3_node(module, _MAKERS[family], **given)
        ours("Decode", vae=vae, samples=made)


LINE = (
    "Fast Video VAE: the latent has {} rows and {} columns; Wan 2.2 5B needs even numbers, so "
    "ComfyUI repeats the opposite edge, which can show. In pixels: {}"
)


@pytest.mark.parametrize(
    ("family", "height", "width", "words"),
    [
        ("wan2.2", 64, 64, None),
        ("wan2.2", 80, 64, (5, 4, "height 64 or 96")),
        ("wan2.2", 90, 72, (5, 4, "height 64 or 96")),  # 10 rows and 8 columns are cropped
        ("wan2.2", 64, 48, (4, 3, "width 32 or 64")),
        ("wan2.2", 16, 48, (1, 3, "height 32, width 32 or 64")),
        # Latents of these are for several models.
        *((family, 48, 80, None) for family in ("wan2.1", "seedvr2", "qwen-image-2.1")),
    ],
)
def test_an_encode_for_wan_2_2_5b_logs_a_size_that_its_model_cuts(
    vae_of, size_lines, family, height, width, words
):
    vae = vae_of(family)
    expected = [] if words is None else [LINE.format(*words)]
    for count, batch in ((1, "video"), (9, "video"), (3, "images")):
        ours("Encode", vae=vae, pixels=clip(count, height, width), batch=batch, chunk=1)
        assert size_lines() == expected
    (video,) = v3_node("nodes_video", "CreateVideo", images=clip(9, height, width), fps=12.0)
    ours("EncodeVideo", vae=vae, video=video, chunk=1)
    assert size_lines() == expected


def test_an_encode_of_a_video_logs_it_for_each_size(vae_of, size_lines):
    (video,) = v3_node("nodes_video", "CreateVideo", images=clip(9, 80, 64), fps=12.0)
    for _ in range(2):
        ours("EncodeVideo", vae=vae_of("wan2.2"), video=video)
        assert size_lines() == [LINE.format(5, 4, "height 64 or 96")]
    ours("EncodeVideo", vae=vae_of("wan2.2"), video=video, height=112, width=64)
    assert size_lines()[1:] == [LINE.format(7, 4, "height 96 or 128")]
