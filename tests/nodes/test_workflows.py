"""Workflows of ComfyUI's nodes and ours, run by the real server: ours give what ComfyUI's give."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fast_video_vae.tests.nodes.server import AUTO, Workflow
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = pytest.mark.comfyui

# One tile holds everything, so that ComfyUI's tiles have no seams.
ONE_TILE = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


def vaes(workflow, vae_file):
    """ComfyUI's VAE, and ours by both ways, all of the same file."""
    stock = workflow.add("VAELoader", vae_name=vae_file)
    return {
        "stock": stock,
        "loaded": workflow.add("FastVAE_Load", vae_name=vae_file, **AUTO),
        "accelerated": workflow.add("FastVAE_Accelerate", vae=stock, **AUTO),
    }


def pictures(server, shown):
    """`[N, H, W, 3]` from what SaveImage shows."""
    files = server.files(shown)
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]).astype(int)


def latents(server, shown):
    (file,) = server.files(shown)
    return load_file(file)["latent_tensor"]


@pytest.mark.parametrize(
    ("ours", "stock", "options"),
    [
        ("VAEEncode", "VAEEncode", {}),
        ("VAEEncodeTiled", "VAEEncodeTiled", ONE_TILE),
        ("FastVAE_Encode", "VAEEncode", {}),
        ("VAEEncodeForInpaint", "VAEEncodeForInpaint", {"grow_mask_by": 6}),
    ],
)
def test_encoders_agree_with_comfyui(server, vae_file, latent_file, ours, stock, options):
    workflow = Workflow()
    loaders = vaes(workflow, vae_file)
    latent = workflow.add("LoadLatent", latent=latent_file)
    video = workflow.add("VAEDecode", samples=latent, vae=loaders["stock"])
    if "grow_mask_by" in options:
        options = options | {"mask": workflow.add("SolidMask", value=0.0, width=128, height=96)}
    saved = {}
    for name, vae in loaders.items():
        kind = stock if name == "stock" else ours
        encoded = workflow.add(kind, pixels=video, vae=vae, **options)
        saved[name], _ = workflow.add("SaveLatent", samples=encoded, filename_prefix=name)
    shown = server.run(workflow)
    expected = latents(server, shown[saved["stock"]])
    assert expected.shape == (1, 16, 5, 12, 16)
    for name in ("loaded", "accelerated"):
        assert relative_error(latents(server, shown[saved[name]]), expected) <= 1e-5


@pytest.mark.parametrize(
    ("ours", "stock", "options"),
    [
        ("VAEDecode", "VAEDecode", {}),
        ("VAEDecodeTiled", "VAEDecodeTiled", ONE_TILE),
        ("FastVAE_Decode", "VAEDecode", {}),
    ],
)
def test_decoders_agree_with_comfyui(server, vae_file, latent_file, ours, stock, options):
    workflow = Workflow()
    latent = workflow.add("LoadLatent", latent=latent_file)
    saved = {}
    for name, vae in vaes(workflow, vae_file).items():
        kind = stock if name == "stock" else ours
        decoded = workflow.add(kind, samples=latent, vae=vae, **options)
        saved[name], _ = workflow.add("SaveImage", images=decoded, filename_prefix=name)
    shown = server.run(workflow)
    expected = pictures(server, shown[saved["stock"]])
    assert expected.shape == (17, 96, 128, 3)
    for name in ("loaded", "accelerated"):
        assert abs(pictures(server, shown[saved[name]]) - expected).max() <= 1


def test_small_tiles_leave_no_seams(server, vae_file, latent_file):
    """Ours cuts only where memory asks for it, so a tiled decode is a decode; ComfyUI's is not."""
    workflow = Workflow()
    latent = workflow.add("LoadLatent", latent=latent_file)
    tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    saved = {}
    for name, vae in vaes(workflow, vae_file).items():
        whole = workflow.add("VAEDecode", samples=latent, vae=vae)
        tiled = workflow.add("VAEDecodeTiled", samples=latent, vae=vae, **tiles)
        one, _ = workflow.add("SaveImage", images=whole, filename_prefix="whole")
        other, _ = workflow.add("SaveImage", images=tiled, filename_prefix="tiled")
        saved[name] = one, other
    shown = server.run(workflow)
    differences = {
        name: abs(pictures(server, shown[one]) - pictures(server, shown[other])).max()
        for name, (one, other) in saved.items()
    }
    assert differences["loaded"] == differences["accelerated"] == 0
    assert differences["stock"] > 1  # so this test can tell


@pytest.mark.parametrize("name", ["loaded", "accelerated"])
def test_a_saved_vae_is_the_file_that_was_loaded(server, vae_file, name):
    workflow = Workflow()
    vae = vaes(workflow, vae_file)[name]
    workflow.add("VAESave", vae=vae, filename_prefix=f"saved/{name}")
    server.run(workflow)
    (file,) = (server.output / "saved").glob(f"{name}_*.safetensors")
    saved, weights = load_file(file), load_file(server.models("vae") / vae_file)
    assert saved.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(saved[key], tensor), key


def test_the_demo_runs_without_a_model(server):
    workflow = Workflow()
    clip, _ = workflow.add("FastVAE_DemoClip")
    vae = workflow.add("FastVAE_Load", vae_name="bundled demo", **AUTO)
    latent = workflow.add("FastVAE_Encode", pixels=[clip, 0], vae=vae)
    video = workflow.add("FastVAE_Decode", samples=latent, vae=vae)
    before, _ = workflow.add("SaveImage", images=[clip, 0], filename_prefix="before")
    after, _ = workflow.add("PreviewImage", images=video)
    film, _ = workflow.add("SaveVideo", video=[clip, 1], filename_prefix="clip", format="auto")
    shown = server.run(workflow)
    original, decoded = pictures(server, shown[before]), pictures(server, shown[after])
    assert original.shape == decoded.shape
    error = ((original - decoded) ** 2).mean()
    assert 10 * np.log10(255**2 / error) > 25  # decibels: it looks the same at a glance
    assert all(file.stat().st_size for file in server.files(shown[film]))
