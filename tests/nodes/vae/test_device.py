"""VAEs on a GPU that ComfyUI gives: their pictures, and their memory back."""

import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.server import AUTO, VAE_FILE, Workflow

pytestmark = pytest.mark.comfyui

# Memory that allocators and libraries may keep after a first decode.
SLACK_BYTES = 64 << 20


def pictures(server, seed):
    """What each VAE decodes, first a latent and then what it encodes."""
    latent = torch.randn(1, 16, 5, 16, 16, generator=torch.Generator().manual_seed(seed))
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input / f"{seed}.latent")
    workflow, saved = Workflow(), []
    samples = workflow.add("LoadLatent", latent=f"{seed}.latent")
    stock = workflow.add("VAELoader", vae_name=VAE_FILE)
    pixels = workflow.add("VAEDecode", samples=samples, vae=stock)
    for vae, nodes in (
        (stock, "VAE{}"),
        (workflow.load(VAE_FILE), "VAE{}"),
        (workflow.add("FastVAE_Accelerate", vae=stock, **AUTO), "FastVAE_{}"),
    ):
        encoded = workflow.add(nodes.format("Encode"), pixels=pixels, vae=vae)
        one, two = (
            workflow.add(nodes.format("Decode"), samples=each, vae=vae)
            for each in (samples, encoded)
        )
        images = workflow.add("ImageBatch", image1=one, image2=two)
        saved.append(workflow.add("SaveImage", images=images, filename_prefix="x")[0])
    shown = server.run(workflow)
    return [server.pictures(shown[number]) for number in saved]


def freed_bytes(server):
    """Return the free bytes of the device after ComfyUI has unloaded all models."""
    server.post("/free", free_memory=True)
    free = 0
    for _ in range(20):  # it lets go when it is idle
        time.sleep(0.25)
        free = max(free, server.get("/system_stats")["devices"][0]["vram_free"])
    return free


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("flags", [[], ["--disable-dynamic-vram"]])
def test_a_gpu_gives_the_frames_of_stock_and_frees_its_memory(start_server, flags):
    with start_server("--fp32-vae", *flags, cpu=False) as server:
        free = []
        for seed in range(3):  # the first warms it up
            expected, *found = pictures(server, seed)
            assert expected.shape == (2 * 17, 128, 128, 3)
            assert all(np.abs(frames - expected).max() <= 1 for frames in found)
            free.append(freed_bytes(server))
        assert min(free) >= free[0] - SLACK_BYTES
