"""The same weights as ComfyUI's VAE and as ours, and ComfyUI's nodes as functions."""

import contextlib
import importlib

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from fast_video_vae.tests.seedvr2 import NARROW


def wrapped(fast):
    """A fast VAE for ComfyUI-WanVideoWrapper."""
    from fast_video_vae.nodes.wan_wrapper.wanvae import WanVideoWrapperVAE

    return WanVideoWrapperVAE(fast)


def stock_vae(state):
    import comfy.sd

    return comfy.sd.VAE(sd=dict(state))


def narrow_seedvr2(state, **options):
    """ComfyUI's class has only the published widths; a constant of its module is patched."""
    import comfy.ldm.seedvr.vae as theirs
    import comfy.sd

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "BYTEDANCE_BLOCK_OUT_CHANNELS", NARROW)
        return comfy.sd.VAE(sd=dict(state), **options)


def accelerated(vae, **choice):
    from fast_video_vae.nodes.vae.accelerate import Choice, accelerate

    return accelerate(vae, Choice(**choice))


def fast_vae(state, folder, **choice):
    from fast_video_vae.nodes.vae.accelerate import Choice, load

    path = folder / "vae.safetensors"
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    return load(path, Choice(**choice))


def relative_error(result, expected):
    assert result.shape == expected.shape
    return ((result - expected).abs().max() / expected.abs().max()).item()


def assert_same(result, expected):
    """Compare two results of nodes, and their tensors within 1e-5 of the largest value."""
    result, expected = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    for given, wanted in zip(result, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert given.shape == wanted.shape
            assert (given - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1e-3)
        else:
            assert given == wanted


def clip(frames, height=64, width=64, channels=3, seed=0):
    """An IMAGE `[N, H, W, C]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(frames, height, width, channels, generator=generator)


def video(frames, height=48, width=64):
    """A video `[1, 3, T, H, W]` in [-1, 1], as the wrapper's nodes convert images."""
    return clip(frames, height, width).movedim(-1, 0)[None] * 2 - 1


def latents(frames, height=6, width=9, batch=1, seed=0, channels=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, frames, height, width, generator=generator)


def frames(count, **options):
    """A small IMAGE; `small_latents` has latents of its size."""
    return clip(count, 32, 48, **options)


def small_latents(count, **options):
    return latents(count, 4, 6, **options)


@contextlib.contextmanager
def stopped_at(layer, most=1):
    """The user presses stop when a layer is called: that ends the body, `most` calls at most."""
    import comfy.model_management as management

    calls = []

    def stop(*_):
        calls.append(1)
        management.interrupt_current_processing(True)

    handle = layer.register_forward_pre_hook(stop)
    try:
        with pytest.raises(management.InterruptProcessingException):
            yield
    finally:
        handle.remove()
        management.interrupt_current_processing(False)
    assert 1 <= len(calls) <= most


def as_saved(images):
    """Convert an IMAGE to bytes like ComfyUI's save nodes: the fraction is dropped."""
    return (images * 255).clamp(0, 255).byte()


def ours(name, hidden=None, **inputs):
    """Execute a VAE or video node of ours with the defaults of its widgets."""
    from fast_video_vae.nodes.vae import joins, nodes
    from fast_video_vae.nodes.video import nodes as video_nodes

    (cls, *_) = (vars(each)[name] for each in (nodes, joins, video_nodes) if name in vars(each))
    defaults = {each.id: getattr(each, "default", None) for each in cls.define_schema().inputs}
    inputs = {key: value for key, value in defaults.items() if value is not None} | inputs
    return cls.PREPARE_CLASS_CLONE({"hidden_inputs": hidden or {}}).execute(**inputs)


def node(name, *arguments, **keywords):
    """Run one of ComfyUI's nodes."""
    import nodes

    cls = nodes.NODE_CLASS_MAPPINGS[name]
    return getattr(cls(), cls.FUNCTION)(*arguments, **keywords)


def v3_node(module, name, **inputs):
    """Run one of ComfyUI's extra nodes."""
    cls = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
    return cls.PREPARE_CLASS_CLONE(None).execute(**inputs).args
