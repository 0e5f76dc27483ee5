"""The VAE for ComfyUI-WanVideoWrapper, and its oracle."""

import torch

from fast_video_vae.tests.benchmarks.peers import comfyui_vae
from fast_video_vae.tests.nodes.vae.pairs import clip


def wrapped(fast):
    from fast_video_vae.nodes.wan_wrapper.wanvae import WanVideoWrapperVAE

    return WanVideoWrapperVAE(fast)


class Oracle:
    """The expected results of the wrapper's VAE, from ComfyUI's network on each part of a video."""

    def __init__(self, state):
        from comfy.latent_formats import Wan21, Wan22

        self.network = comfyui_vae(state)
        self.format = Wan21() if state["conv2.weight"].shape[0] == 16 else Wan22()

    def encode(self, video, end_=False):
        parts = video.split([video.shape[2] - end_, int(end_)], dim=2)
        means = [self.network.encode(part) for part in parts if part.shape[2]]
        return self.format.process_in(torch.cat(means, dim=2).float())

    def decode(self, latent, end_=False):
        latent = self.format.process_out(latent)
        parts = latent.split([latent.shape[2] - end_, int(end_)], dim=2)
        return torch.cat([self.network.decode(each) for each in parts if each.shape[2]], dim=2)


def video(frames, height=48, width=64):
    """Return a video `[1, 3, T, H, W]` in [-1, 1], as the wrapper's nodes convert images."""
    return clip(frames, height, width).movedim(-1, 0)[None] * 2 - 1
