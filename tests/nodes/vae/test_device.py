"""VAEs on a GPU that ComfyUI gives, patched and not: their pictures, and their memory back."""

import itertools
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.server import VAE_FILE, Workflow

pytestmark = pytest.mark.comfyui

# Memory that allocators and libraries may keep after a first decode.
SLACK_BYTES = 64 << 20
AMOUNTS = (0.0, 0.02)


def pictures(server, seed):
    """What each VAE decodes, first a latent and then what it encodes, patched by some amounts."""
    latent = torch.randn(1, 16, 5, 16, 16, generator=torch.Generator().manual_seed(seed))
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input / f"{seed}.latent")
    workflow, saved = Workflow(), {}
    samples = workflow.add("LoadLatent", latent=f"{seed}.latent")
    ways = workflow.vaes(VAE_FILE)
    pixels = workflow.add("VAEDecode", samples=samples, vae=ways["stock"])
    for (way, vae), amount in itertools.product(ways.items(), AMOUNTS):
        nodes = "FastVAE_{}" if way == "accelerated" else "VAE{}"
        vae = workflow.add("Test_PatchVAE", vae=vae, amount=amount) if amount else vae
        encoded = workflow.add(nodes.format("Encode"), pixels=pixels, vae=vae)
        one, two = (
            workflow.add(nodes.format("Decode"), samples=each, vae=vae)
            for each in (samples, encoded)
        )
        images = workflow.add("ImageBatch", image1=one, image2=two)
        saved[way, amount], *_ = workflow.add("SaveImage", images=images, filename_prefix="x")
    shown = server.run(workflow)
    return {key: server.pictures(shown[number]) for key, number in saved.items()}


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
            found = pictures(server, seed)
            for (way, amount), frames in found.items():
                assert frames.shape == (2 * 17, 128, 128, 3)
                assert np.abs(frames - found["stock", amount]).max() <= 1, (way, amount)
            assert np.abs(found["stock", 0.02] - found["stock", 0.0]).max() > 5
            free.append(freed_bytes(server))
        assert min(free) >= free[0] - SLACK_BYTES
