"""The families that the VAE nodes are tested with: the same weights in ComfyUI's VAE and ours."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from fast_video_vae.tests.nodes.vae.pairs import fast_vae, narrow_seedvr2, stock_vae
from fast_video_vae.tests.seedvr2 import random_seedvr2


class Family(NamedTuple):
    name: str
    state: dict[str, Tensor]
    stock: Any  # ComfyUI's VAE
    fast: Any  # ours
    keys: tuple[str, ...]  # weights for patches, one per kind of layer
    block: str  # a layer of the middle, of either network

    def another_stock(self):
        """A second VAE of ComfyUI with the same weights."""
        return (narrow_seedvr2 if self.name == "seedvr2" else stock_vae)(self.state)


@pytest.fixture(scope="session")
def wan(state, stock, fast):
    keys = "decoder.upsamples.4.residual.2.weight", "decoder.head.2.bias"
    return Family("wan2.1", state, stock, fast, keys, "middle.0")


@pytest.fixture(scope="session")
def seedvr2(comfyui, tmp_path_factory):
    state = random_seedvr2()
    keys = (
        "decoder.up_blocks.0.upsamplers.0.upscale_conv.weight",
        "decoder.up_blocks.0.upsamplers.0.conv.weight",
        "decoder.up_blocks.2.upsamplers.0.upscale_conv.bias",
        "decoder.mid_block.attentions.0.to_q.weight",
        "decoder.up_blocks.1.resnets.1.norm2.weight",
    )
    fast = fast_vae(state, tmp_path_factory.mktemp("vae"))
    return Family("seedvr2", state, narrow_seedvr2(state), fast, keys, "mid_block.resnets.0")


@pytest.fixture(scope="session")
def models(comfyui):
    """Folder in which the loaders look for VAEs."""
    folder = comfyui / "models" / "vae"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(params=["wan", "seedvr2"])
def family(request):
    """A VAE family."""
    return request.getfixturevalue(request.param)
