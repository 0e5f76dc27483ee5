"""Workflows of ComfyUI's nodes and ours, run by the real server: ours give what ComfyUI's give."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.tests.nodes.server import AUTO, Workflow
from fast_video_vae.tests.nodes.vae.pairs import relative_error

pytestmark = pytest.mark.comfyui

# One tile holds everything, so that ComfyUI's tiles have no seams.
ONE_TILE = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


@pytest.mark.parametrize(
    ("kind", "options"), [("VAE{}", {}), ("VAE{}Tiled", ONE_TILE), ("FastVAE_{}", {})]
)
def test_encoders_and_decoders_agree_with_comfyui(server, vae_file, latent_file, kind, options):
    workflow, saved = Workflow(), {}
    loaders = workflow.vaes(vae_file)
    latent = workflow.add("LoadLatent", latent=latent_file)
    video = workflow.add("VAEDecode", samples=latent, vae=loaders["stock"])
    for name, vae in loaders.items():
        form = kind.replace("FastVAE_", "VAE") if name == "stock" else kind
        encoded = workflow.add(form.format("Encode"), pixels=video, vae=vae, **options)
        decoded = workflow.add(form.format("Decode"), samples=latent, vae=vae, **options)
        one, _ = workflow.add("SaveLatent", samples=encoded, filename_prefix=name)
        other, _ = workflow.add("SaveImage", images=decoded, filename_prefix=name)
        saved[name] = one, other
    shown = server.run(workflow)
    found = {
        name: (
            load_file(server.files(shown[one])[0])["latent_tensor"],
            server.pictures(shown[other]),
        )
        for name, (one, other) in saved.items()
    }
    encoded, decoded = found.pop("stock")
    assert encoded.shape == (1, 16, 5, 12, 16)
    assert decoded.shape == (17, 96, 128, 3)
    for latent, images in found.values():
        assert relative_error(latent, encoded) <= 1e-5
        assert abs(images - decoded).max() <= 1


@pytest.mark.parametrize("name", ["loaded", "accelerated"])
def test_a_saved_vae_is_the_file_that_was_loaded(server, vae_file, name):
    workflow = Workflow()
    vae = workflow.vaes(vae_file)[name]
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
    original, decoded = server.pictures(shown[before]), server.pictures(shown[after])
    assert original.shape == decoded.shape
    error = ((original - decoded) ** 2).mean()
    assert 10 * np.log10(255**2 / error) > 25  # decibels: it looks the same at a glance
    assert all(file.stat().st_size for file in server.files(shown[film]))
