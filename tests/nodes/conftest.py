"""ComfyUI for the tests of the nodes: in this process, and as a server. Skips where it is not."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.server import Server
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, stock_vae
from fast_video_vae.tests.wan22 import random_qwen21


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory):
    """ComfyUI's modules can be imported; gives the folder that it has its files in."""
    _skip_without_comfyui()
    base = tmp_path_factory.mktemp("comfyui")
    import_comfyui(base)
    return base


@pytest.fixture
def inference(comfyui):
    """ComfyUI runs nodes in inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def state():
    """A narrow Wan 2.1; the VAEs below have these weights, and no test changes them."""
    return random_state_dict(8)


@pytest.fixture(scope="session")
def stock(comfyui, state):
    """ComfyUI's VAE."""
    return stock_vae(state)


@pytest.fixture(scope="session")
def fast(comfyui, state, tmp_path_factory):
    """Ours."""
    return fast_vae(state, tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="session")
def picture_vae(comfyui, tmp_path_factory):
    """A narrow Qwen-Image 2.1, ours."""
    return fast_vae(random_qwen21(), tmp_path_factory.mktemp("vae"))


@pytest.fixture
def output(comfyui, tmp_path, monkeypatch):
    """The folder that ComfyUI's nodes that save put files in."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


@pytest.fixture
def progress(comfyui, monkeypatch):
    """What progress bars show from here on: `(value, total)` each time."""
    import comfy.utils

    shown = []
    hook = lambda value, total, preview, node_id=None: shown.append((value, total))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0)
    return shown


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Makes a ComfyUI with this pack and the nodes of `extra_nodes.py`, to be entered."""
    _skip_without_comfyui()

    def start(*flags, **options):
        base = tmp_path_factory.mktemp("server")
        (base / "custom_nodes").mkdir()
        extra = Path(__file__).with_name("extra_nodes.py")
        shutil.copy(extra, base / "custom_nodes" / extra.name)
        return Server(base, *flags, threads=1, **options)  # the tensors of the tests are tiny

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """One that runs, on the CPU, for all tests that leave it as it was."""
    with start_server() as server:
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
