"""The same weights as ComfyUI's VAE and as ours, and ComfyUI's nodes as functions."""

import importlib

import torch
from safetensors.torch import save_file


def stock_vae(state):
    import comfy.sd

    return comfy.sd.VAE(sd=dict(state))


def fast_vae(state, folder, **choice):
    from fast_video_vae.nodes.vae.accelerate import Choice, load

    path = folder / "vae.safetensors"
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    return load(path, Choice(**choice))


def relative_error(result, expected):
    assert result.shape == expected.shape
    return ((result - expected).abs().max() / expected.abs().max()).item()


def clip(frames, height=64, width=64, channels=3, seed=0):
    """An IMAGE `[N, H, W, C]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(frames, height, width, channels, generator=generator)


def latents(frames, height=6, width=9, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 16, frames, height, width, generator=generator)


def node(name, *arguments, **keywords):
    """Run one of ComfyUI's nodes."""
    import nodes

    cls = nodes.NODE_CLASS_MAPPINGS[name]
    return getattr(cls(), cls.FUNCTION)(*arguments, **keywords)


def v3_node(module, name, **inputs):
    """Run one of ComfyUI's extra nodes."""
    cls = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
    return cls.PREPARE_CLASS_CLONE(None).execute(**inputs).args
