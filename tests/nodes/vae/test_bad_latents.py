"""Latents and images that the nodes refuse, and sizes that a model cuts: what the user reads."""

import functools
import re

import pytest
import torch

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import (
    clip,
    fast_vae,
    latents,
    node,
    ours,
    v3_node,
    wrapped,
)
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

CPU = torch.device("cpu")

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

FROM = r" \(from 0\), made by a sampler or node, not the VAE$"


def shown(vae, samples):
    from fast_video_vae.nodes.preview.nodes import PreviewLatent

    return PreviewLatent.PREPARE_CLASS_CLONE(None).execute(samples=samples)


# The name of the input before an error, and the way of a latent.
WAYS = {
    "Decode": ("samples: ", lambda vae, x: ours("Decode", vae=vae, samples=x)),
    "DecodeVideo": ("samples: ", lambda vae, x: ours("DecodeVideo", vae=vae, samples=x)),
    "VAE Decode": ("", lambda vae, x: node("VAEDecode", vae=vae, samples=x)),
    "tiled": ("", lambda vae, x: node("VAEDecodeTiled", vae, x, 64, 16, 8, 4)),
    "Preview": ("samples: ", shown),
    "WANVAE": ("", lambda vae, x: wrapped(vae).decode(x["samples"], CPU)),
    "WANVAE, a list": ("", lambda vae, x: wrapped(vae).decode(list(x["samples"]), CPU)),
}


def spoiled(batch, *places):
    """A LATENT that is bad at some of the last two of five latent frames."""
    x = latents(5, batch=batch)
    for video, frame in places:
        x[video, 3, frame, 1, 1] = torch.nan
    return {"samples": x}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_names_the_first_bad_latent_frame(fast, approx, monkeypatch, way):
    monkeypatch.setattr("fast_video_vae.nodes.vae.pieces.load", pytest.fail)  # before any work
    name, take = WAYS[way]
    start = f"^{name}latent has . values that are NaN or infinite; expected none: latent frame "
    with refused(f"{start}3 of 5{FROM}"):
        take(fast, spoiled(1, (0, 3), (0, 4)))
    # The wrapper has videos one by one.
    place = "4 of 5" if "WANVAE" in way else "3 of 5, video 1 of 2"
    with refused(f"{start}{place}{FROM}"):
        take(fast, spoiled(2, (1, 3), (0, 4)))


def test_another_vae_and_the_sampler_refuse_it_with_the_same_words(stock):
    from fast_video_vae.nodes.host.input_checks import TYPES

    with refused(f"^samples: .* latent frame 3 of 5{FROM}"):
        ours("Decode", vae=stock, samples=spoiled(1, (0, 3)))
    with refused("^latent has 1280 values that are NaN or infinite"):
        TYPES["LATENT"]({"samples": torch.full((1, 64, 20), torch.inf)})


def test_every_encode_names_the_first_bad_frame(fast):
    pixels = clip(9, 16, 16)
    pixels[[6, 8], 3, 3] = torch.inf
    bad = "^{}frames has 6 values that are NaN or infinite; expected none: frame {}"
    bad += r" \(from 0\), made by another node"
    for batch, place in (("video", "6 of 9"), ("images", "0 of 1, video 6 of 9")):
        with refused(bad.format("pixels: ", place)):
            ours("Encode", vae=fast, pixels=pixels, batch=batch, chunk=1)
    with refused(r"^pixels: pixels is 4 x 16 \(H x W\); expected at least 8 x 8$"):
        ours("Encode", vae=fast, pixels=clip(1, 4, 16))
    (video,) = v3_node("nodes_video", "CreateVideo", images=pixels, fps=12.0)
    with refused(bad.format("video: ", "6")):
        ours("EncodeVideo", vae=fast, video=video)
    videos = torch.stack([clip(9, 16, 16), pixels]).movedim(-1, 1)
    for given in (videos, list(videos)):
        with refused(bad.format("", "6 of 9")):
            wrapped(fast).encode(given, CPU, end_=True)


FAMILIES = {
    "wan2.1": (lambda: random_state_dict(8), "EmptyHunyuanLatentVideo"),
    "wan2.2": (lambda: random_wan22(8, 8), "Wan22ImageToVideoLatent"),
    "seedvr2": (random_seedvr2, "VAE Encode (Fast)"),
}
MODELS = {16: "Wan 2.1, 2.2 14B, Qwen-Image, SeedVR2", 48: "Wan 2.2 5B", 64: "Qwen-Image 2.1"}


@pytest.fixture(scope="module")
def vae_of(comfyui, tmp_path_factory):
    return functools.cache(lambda name: fast_vae(FAMILIES[name][0](), tmp_path_factory.mktemp("v")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_latent_of_another_model_names_both_and_the_nodes_to_use(vae_of, family):
    vae, maker = vae_of(family), FAMILIES[family][1]
    needed = vae.latent_channels
    # For SeedVR2, 48 channels are three latents, with time in the channels.
    for channels in {4, 16, 48, 64} - {needed, 48 if family == "seedvr2" else 0}:
        load = f"Load VAE (Fast) for {MODELS[channels]}, or " if channels in MODELS else ""
        error = (
            f"latent has {channels} channels; this VAE needs {needed}: use {load}{maker} for "
            f"{MODELS[needed]}"
        )
        for name, take in list(WAYS.values())[:4]:
            with refused(f"^{re.escape(name + error)}$"):
                take(vae, {"samples": latents(1, channels=channels)})
    if family.startswith("wan"):  # the node that the error names makes such latents
        size = {"width": 64, "height": 64, "length": 5, "batch_size": 1}
        given = ("nodes_hunyuan", {}) if family == "wan2.1" else ("nodes_wan", {"vae": vae})
        (made,) = v3_node(given[0], maker, **size, **given[1])
        ours("Decode", vae=vae, samples=made)


LINE = (
    "Fast Video VAE: the latent has {} rows and {} columns; Wan 2.2 5B needs even numbers, so "
    "ComfyUI repeats the opposite edge, which can show. In pixels: {}"
)


def test_an_encode_for_wan_2_2_5b_logs_each_size_that_its_model_cuts(vae_of, monkeypatch, caplog):
    monkeypatch.setattr(errors, "_logged", set())
    lines = lambda: [text for text in caplog.messages if " rows and " in text]  # noqa: E731
    pixels = clip(9, 26, 48)  # 10 rows are cropped
    (video,) = v3_node("nodes_video", "CreateVideo", images=pixels, fps=12.0)
    ours("Encode", vae=vae_of("wan2.1"), pixels=clip(1, 24, 40))  # for several models
    assert lines() == []
    vae, expected = vae_of("wan2.2"), [LINE.format(1, 3, "height 32, width 32 or 64")]
    assert vae.spacial_compression_decode() == vae.spacial_compression_encode() == 16
    ours("Encode", vae=vae, pixels=pixels, chunk=1)
    assert lines() == expected
    ours("EncodeVideo", vae=vae, video=video, chunk=1)
    assert lines() == expected  # once
    ours("EncodeVideo", vae=vae, video=video, height=112, width=64)
    assert lines()[1:] == [LINE.format(7, 4, "height 96 or 128")]
