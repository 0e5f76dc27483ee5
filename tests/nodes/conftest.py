"""ComfyUI for the tests of the nodes: in this process, and as a server. Skips where it is not."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.server import Server


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory):
    """ComfyUI's modules can be imported; gives the folder that it has its files in."""
    _skip_without_comfyui()
    base = tmp_path_factory.mktemp("comfyui")
    import_comfyui(base)
    return base


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A running ComfyUI with this pack. One thread: the tensors of the tests are tiny."""
    _skip_without_comfyui()
    base = tmp_path_factory.mktemp("server")
    (base / "custom_nodes").mkdir()
    extra = Path(__file__).with_name("extra_nodes.py")
    shutil.copy(extra, base / "custom_nodes" / extra.name)
    with Server(base, threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def vae_file(server):
    """A small VAE with random weights, where the server's loaders find it under this name."""
    save_file(random_state_dict(8), server.models("vae") / "random.safetensors")
    return "random.safetensors"


@pytest.fixture(scope="session")
def latent_file(server):
    """A random latent of 17 frames of 96 x 128, where LoadLatent finds it under this name."""
    latent = torch.randn(1, 16, 5, 12, 16, generator=torch.Generator().manual_seed(1))
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, server.input / "random.latent")
    return "random.latent"


def _skip_without_comfyui():
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
