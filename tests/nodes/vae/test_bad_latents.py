"""Latents and images that the nodes refuse, and sizes that a model cuts: what the user reads."""

import functools
import re

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, node, ours, v3_node
from fast_video_vae.tests.nodes.wan_wrapper.wrapped import CPU, wrapped
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.vae.streaming.fake_gpu import OfGPU
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22
from fast_video_vae.vae import model
from fast_video_vae.vae.streaming import session
from fast_video_vae.vae.validation import check_frames

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

FROM = r" \(from 0\), made by a sampler or node, not the VAE$"


def shown(vae, samples):
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    return PreviewLatent.PREPARE_CLASS_CLONE(None).execute(samples={"samples": samples})


# The name of the input before an error, and the way of a latent.
WAYS = {
    "Decode": ("samples: ", lambda vae, x: ours("Decode", vae=vae, samples={"samples": x})),
    "DecodeVideo": (
        "samples: ",
        lambda vae, x: ours("DecodeVideo", vae=vae, samples={"samples": x}),
    ),
    "VAE Decode": ("", lambda vae, x: node("VAEDecode", vae=vae, samples={"samples": x})),
    "tiled": ("", lambda vae, x: node("VAEDecodeTiled", vae, {"samples": x}, 64, 16, 8, 4)),
    "Preview": ("samples: ", shown),
    "WANVAE": ("", lambda vae, x: wrapped(vae).decode(x, CPU)),
    "WANVAE, a list": ("", lambda vae, x: wrapped(vae).decode(list(x), CPU)),
}


def spoiled(x, *places):
    for video, frame in places:
        x[video, 3, frame, 1, 1] = torch.nan
    return x


@pytest.mark.parametrize("way", WAYS)
def test_every_way_names_the_first_bad_latent_frame(fast, approx, monkeypatch, way):
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)  # before any work
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
    with refused("^latent has 1280 values that are NaN or infinite"):
        TYPES["LATENT"]({"samples": torch.full((1, 64, 20), torch.inf)})


@pytest.fixture
def gpu(monkeypatch):
    """Give a function that makes the next `times` checks of frames skip the values, as on a GPU."""
    monkeypatch.setattr(session, "Upload", OfGPU)

    def skip(times):
        left = iter(range(times))

        def check(*given, values):
            return check_frames(*given, values=values and next(left, None) is None)

        monkeypatch.setattr(model, "check_frames", check)

    return skip


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


def test_an_encode_of_a_video_names_the_frame(fast):
    (video,) = v3_node("nodes_video", "CreateVideo", images=images_of(9, 6, 8), fps=12.0)
    with refused(r"^video: frames has 6 values .* frame 6 \(from 0\), made by another node"):
        ours("EncodeVideo", vae=fast, video=video)
    videos = torch.stack([images_of(9), images_of(9, 8)]).movedim(-1, 1)
    for given in (videos, list(videos)):
        with refused(r"^frames has 3 values .* frame 8 of 9 \(from 0\), made by another node"):
            wrapped(fast).encode(given, CPU, end_=True)


FAMILIES = {
    "wan2.1": (lambda: random_state_dict(8), "EmptyHunyuanLatentVideo"),
    "wan2.2": (lambda: random_wan22(8, 8), "Wan22ImageToVideoLatent"),
    "seedvr2": (random_seedvr2, "VAE Encode (Fast)"),
    "qwen-image-2.1": (random_qwen21, "VAE Encode (Fast)"),
}
MODELS = {16: "Wan 2.1, 2.2 14B, Qwen-Image, SeedVR2", 48: "Wan 2.2 5B", 64: "Qwen-Image 2.1"}


@pytest.fixture(scope="module")
def vae_of(comfyui, tmp_path_factory):
    return functools.cache(lambda name: fast_vae(FAMILIES[name][0](), tmp_path_factory.mktemp("v")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_latent_of_another_model_names_both_and_the_nodes_to_use(vae_of, family):
    vae, maker = vae_of(family), FAMILIES[family][1]
    needed = vae.latent_channels
    for channels in {4, 12, 16, 48, 64, 128} - {needed}:
        load = f"Load VAE (Fast) for {MODELS[channels]}, or " if channels in MODELS else ""
        error = (
            f"latent has {channels} channels; this VAE needs {needed}: use {load}{maker} for "
            f"{MODELS[needed]}"
        )
        if (family, channels) == ("seedvr2", 48):  # three latents, with time in the channels
            continue
        for name, take in list(WAYS.values())[:4]:
            with refused(f"^{re.escape(name + error)}$"):
                take(vae, latents(1, channels=channels))


@pytest.mark.parametrize(("family", "module"), [("wan2.1", "hunyuan"), ("wan2.2", "wan")])
def test_the_node_that_an_error_names_makes_such_latents(vae_of, family, module):
    vae, empty = vae_of(family), {"width": 64, "height": 64, "length": 5, "batch_size": 1}
    given = empty | ({"vae": vae} if family == "wan2.2" else {})
    (made,) = v3_node(f"nodes_{module}", FAMILIES[family][1], **given)
    ours("Decode", vae=vae, samples=made)


LINE = (
    "Fast Video VAE: the latent has {} rows and {} columns; Wan 2.2 5B needs even numbers, so "
    "ComfyUI repeats the opposite edge, which can show. In pixels: {}"
)


@pytest.mark.parametrize(
    ("family", "height", "width", "words"),
    [
        ("wan2.2", 64, 64, None),
        ("wan2.2", 90, 72, (5, 4, "height 64 or 96")),  # 10 rows and 8 columns are cropped
        ("wan2.2", 16, 48, (1, 3, "height 32, width 32 or 64")),
        # Latents of these are for several models.
        *((family, 48, 80, None) for family in ("wan2.1", "seedvr2", "qwen-image-2.1")),
    ],
)
def test_an_encode_for_wan_2_2_5b_logs_each_size_that_its_model_cuts(
    vae_of, size_lines, family, height, width, words
):
    vae, expected = vae_of(family), [] if words is None else [LINE.format(*words)]
    (video,) = v3_node("nodes_video", "CreateVideo", images=clip(9, height, width), fps=12.0)
    for _ in range(2):
        ours("EncodeVideo", vae=vae, video=video, chunk=1)
        assert size_lines() == expected
    for count, batch in ((1, "video"), (9, "video"), (3, "images")):
        ours("Encode", vae=vae, pixels=clip(count, height, width), batch=batch, chunk=1)
        assert size_lines() == expected
    if words:
        ours("EncodeVideo", vae=vae, video=video, height=112, width=64)
        assert size_lines()[1:] == [LINE.format(7, 4, "height 96 or 128")]
