"""ComfyUI for the tests of the nodes: in this process, and as a server. Skips where it is not."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.checkout import import_comfyui, why_unavailable
from fast_video_vae.tests.nodes.prompts import give_models, give_nodes
from fast_video_vae.tests.nodes.server import VAE_FILE, Server
from fast_video_vae.tests.nodes.vae.pairs import fast_vae, stock_vae
from fast_video_vae.tests.wan22 import random_qwen21


@pytest.fixture(scope="session")
def available():
    """ComfyUI can be started."""
    if reason := why_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def comfyui(available, tmp_path_factory):
    """ComfyUI's modules can be imported; gives the folder that it has its files in."""
    base = tmp_path_factory.mktemp("comfyui")
    import_comfyui(base)
    return base


@pytest.fixture(scope="module", autouse=True)
def unloaded():
    """No file leaves a loaded model: ComfyUI would warn in the next one of a clone that is gone."""
    yield
    if management := sys.modules.get("comfy.model_management"):
        management.unload_all_models()
        loaded = management.current_loaded_models
        loaded[:] = [model for model in loaded if not model.is_dead()]


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
def approx(comfyui, tmp_path, monkeypatch):
    """An empty models/vae_approx, and tiny decoders in float32."""
    import folder_paths

    from fast_video_vae.nodes.preview import tiny_decoder

    monkeypatch.setattr(tiny_decoder, "dtype_on", lambda device: torch.float32)
    folder = tmp_path / "vae_approx"
    folder.mkdir()
    known = folder_paths.folder_names_and_paths
    monkeypatch.setitem(known, "vae_approx", ([str(folder)], known["vae_approx"][1]))
    folder_paths.filename_list_cache.pop("vae_approx", None)
    yield folder
    folder_paths.filename_list_cache.pop("vae_approx", None)


@pytest.fixture
def progress(comfyui, monkeypatch):
    """Record the updates of progress bars as `(value, total)`."""
    import comfy.utils

    shown = []
    hook = lambda value, total, preview, node_id=None: shown.append((value, total))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0)
    return shown


@pytest.fixture(scope="session")
def start_server(available, tmp_path_factory):
    """Makes a ComfyUI with this pack, `extra_nodes.py` and a small VAE, to be entered."""

    def start(*flags, **options):
        base = tmp_path_factory.mktemp("server")
        give_nodes(base)
        server = Server(base, *flags, threads=1, **options)  # the tensors of the tests are tiny
        save_file(random_state_dict(8), server.models("vae") / VAE_FILE)
        return server

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """A running server on the CPU, shared by tests that do not change it."""
    with start_server() as server:
        yield server


@pytest.fixture(scope="session")
def expert_server(server, comfyui):
    """The same server, with the models `expert-0` and `expert-1`, a LoRA for each, and others."""
    give_models(server)
    return server
