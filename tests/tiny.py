"""Random weights of tiny decoders of Wan, and ComfyUI's frames with them."""

import torch


def random_tiny(channels=16, seed=0):
    """Return a state dict in the layout of the files.

    The weights keep the size of activations, so that every layer matters in the result.
    """
    from comfy.taesd.taehv import TAEHV

    generator, state = torch.Generator().manual_seed(seed), {}
    for key, weight in TAEHV(channels).decoder.state_dict().items():
        scale = (2 / weight[0].numel()) ** 0.5 if weight.ndim == 4 else 0.1
        scale *= 0.3 if ".conv.4." in key else 0.05 if key.startswith("22.") else 1
        state[f"decoder.{key}"] = torch.randn(weight.shape, generator=generator) * scale
    return state


def stock_frames(state, latent):
    """Return ComfyUI's frames `[B, 3, 4 t - 3, H, W]` of a latent as the network expects it."""
    from comfy.taesd.taehv import TAEHV

    network = TAEHV(latent.shape[1]).eval().requires_grad_(False)
    assert not network.load_state_dict(state, strict=False).unexpected_keys
    return network.decode(latent)
