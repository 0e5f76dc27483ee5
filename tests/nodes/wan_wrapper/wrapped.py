"""The VAE for ComfyUI-WanVideoWrapper, and videos for it."""

from fast_video_vae.tests.nodes.vae.pairs import clip


def wrapped(fast):
    from fast_video_vae.nodes.wan_wrapper.wanvae import WanVideoWrapperVAE

    return WanVideoWrapperVAE(fast)


def video(frames, height=48, width=64):
    """Return a video `[1, 3, T, H, W]` in [-1, 1], as the wrapper's nodes convert images."""
    return clip(frames, height, width).movedim(-1, 0)[None] * 2 - 1
