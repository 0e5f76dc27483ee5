"""Decodes on the device that ComfyUI gives, patched and not: its pictures, and its memory back.

With a GPU once as ComfyUI boots by default, with DynamicVRAM, and once without.
"""

import contextlib
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.server import Workflow

pytestmark = pytest.mark.comfyui

# What allocators and libraries may keep after a first decode.
SLACK_BYTES = 64 << 20


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="cpu"),
        pytest.param([], id="DynamicVRAM", marks=pytest.mark.gpu),
        pytest.param(["--disable-dynamic-vram"], id="static", marks=pytest.mark.gpu),
    ],
)
def device_server(request):
    """A server on that device, with the weights; whether it is on the CPU."""
    cpu = request.param is None
    if not cpu and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    with contextlib.ExitStack() as stack:
        if cpu:
            server = request.getfixturevalue("server")
        else:
            start = request.getfixturevalue("start_server")
            server = stack.enter_context(start("--fp32-vae", *request.param, cpu=False))
        save_file(random_state_dict(8), server.models("vae") / "device.safetensors")
        yield server, cpu


def write_latent(server, seed):
    latent = torch.randn(1, 16, 5, 16, 16, generator=torch.Generator().manual_seed(seed))
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input / f"{seed}.latent")
    return f"{seed}.latent"


def decode(server, seed, amounts):
    """The pictures of ComfyUI's VAE and of ours for each amount of a patch, by way and amount."""
    workflow, saved = Workflow(), {}
    latent = workflow.add("LoadLatent", latent=write_latent(server, seed))
    for way, vae in workflow.vaes("device.safetensors").items():
        for amount in amounts:
            patched = workflow.add("Test_PatchVAE", vae=vae, amount=amount) if amount else vae
            images = workflow.add("VAEDecode", samples=latent, vae=patched)
            saved[way, amount], *_ = workflow.add("SaveImage", images=images, filename_prefix="x")
    shown = server.run(workflow)
    return {key: server.pictures(shown[number]) for key, number in saved.items()}


def freed_bytes(server):
    """What the device has free once ComfyUI has let go of all models."""
    server.post("/free", unload_models=True, free_memory=True)
    free = 0
    for _ in range(20):  # it lets go when it is idle
        time.sleep(0.25)
        (device,) = server.get("/system_stats")["devices"]
        free = max(free, device["vram_free"])
    return free


def test_three_decodes_are_stock_s_and_give_their_memory_back(device_server):
    (server, cpu), before = device_server, None
    for seed in range(1 if cpu else 4):  # the first warms it up
        pictures = decode(server, seed, (0.0, 0.02))
        for amount in (0.0, 0.02):
            for way in ("loaded", "accelerated"):
                difference = np.abs(pictures[way, amount] - pictures["stock", amount])
                assert difference.max() <= 1, (way, amount)
        assert np.abs(pictures["stock", 0.02] - pictures["stock", 0.0]).max() > 5
        if not cpu:
            free = freed_bytes(server)
            before = free if before is None else before
            assert free >= before - SLACK_BYTES
