"""The VAE for ComfyUI-WanVideoWrapper, and its oracle."""

from types import SimpleNamespace

import torch

from fast_video_vae.tests.benchmarks.peers import comfyui_vae
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae
from fast_video_vae.tests.wan22 import random_wan22

CPU = torch.device("cpu")


def wrapped(fast):
    from fast_video_vae.nodes.wan_wrapper.wanvae import WanVideoWrapperVAE

    return WanVideoWrapperVAE(fast)


class Oracle:
    """The expected results of the wrapper's VAE, from ComfyUI's network."""

    def __init__(self, state):
        from comfy.latent_formats import Wan21, Wan22

        self.network = comfyui_vae(state)
        self.format = Wan21() if state["conv2.weight"].shape[0] == 16 else Wan22()

    def encode(self, video, end_=False):
        parts = (video[:, :, :-1], video[:, :, -1:]) if end_ else (video,)
        return self.format.process_in(torch.cat([self.network.encode(x) for x in parts], 2).float())

    def decode(self, latent, end_=False):
        latent = self.format.process_out(latent)
        parts = (latent[:, :, :-1], latent[:, :, -1:]) if end_ else (latent,)
        return torch.cat([self.network.decode(x) for x in parts], dim=2).float()


def video(frames, height=48, width=64, batch=1, seed=0):
    """Return videos `[B, 3, T, H, W]` in [-1, 1], as the wrapper's nodes convert images."""
    images = [clip(frames, height, width, seed=seed + each) for each in range(batch)]
    return torch.stack(images).permute(0, 4, 1, 2, 3) * 2 - 1


def family_of(name, folder):
    """A narrow VAE with random weights, and ComfyUI's network with them."""
    state = random_state_dict(8) if name == "wan2.1" else random_wan22(8, 16)
    channels, factor = (16, 8) if name == "wan2.1" else (48, 16)
    known = {"state": state, "channels": channels, "factor": factor}
    return SimpleNamespace(**known, oracle=Oracle(state), fast=fast_vae(state, folder))
