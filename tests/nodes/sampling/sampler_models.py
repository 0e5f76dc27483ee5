"""Pairs of small experts, what to sample from, and the sampler node as a function."""

import functools

import torch

from fast_video_vae.tests.nodes.diffusion import inputs, load_model, random_weights
from fast_video_vae.tests.nodes.vae.pairs import node, v3_node

DEFAULTS = {
    "preset": "base",
    "seed": 7,
    "steps": 4,
    "sampler_name": "euler",
    "scheduler": "simple",
    "cfg_high": "1",
    "cfg_low": "1",
    "shift_high": "5",
    "shift_low": "auto",
    "boundary": "auto",
    "plain_steps": -1,
    "start_at_step": 0,
    "end_at_step": 10000,
    "denoise": 1.0,
    "add_noise": "enable",
    "return_with_leftover_noise": "disable",
    "lora_mode": "auto",
    "free_high": False,
}


@functools.lru_cache(maxsize=4)  # two kinds; all of them would take 1 GB
def expert(kind="wan21-t2v", seed=0):
    """A MODEL; another seed has other weights."""
    return load_model(kind, random_weights(kind, seed))


def experts(kind="wan21-t2v"):
    return {"model_high": expert(kind, 0), "model_low": expert(kind, 1)}


def prompts(kind="wan21-t2v"):
    _, positive, negative = inputs(kind)
    return {"positive": positive, "negative": negative}


def empty(kind="wan21-t2v"):
    return {"samples": torch.zeros_like(inputs(kind)[0])}


@torch.inference_mode()
def run(kind="wan21-t2v", **given):
    """Return all outputs of Wan Sampler (Fast), called as by ComfyUI."""
    from fast_video_vae.nodes.sampling.nodes import WanSampler

    known = DEFAULTS | experts(kind) | prompts(kind) | {"latent_image": empty(kind)} | given
    known = {name: value for name, value in known.items() if value is not None}
    texts = ("shift_high", "shift_low", "cfg_high", "cfg_low", "boundary")
    checked = WanSampler.validate_inputs(**{name: known[name] for name in texts})
    if checked is not True:
        raise ValueError(checked)
    names = ("LATENT", "denoised", "sigmas", "report", "timing")
    outputs = WanSampler.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**known).args
    return dict(zip(names, outputs, strict=True))


def samples(kind="wan21-t2v", **given):
    """The latent of a run."""
    return run(kind, **given)["LATENT"]["samples"]


def shifted(model, shift):
    """A model with another shift, by ComfyUI's node."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    return ModelSamplingSD3().patch(model, shift)[0]


@torch.inference_mode()
def ksampler(
    model, kind="wan21-t2v", *, cfg=1.0, steps=4, sampler="euler", denoise=1.0, latent=None
):
    """ComfyUI's KSampler."""
    known = prompts(kind)
    latent = empty(kind) if latent is None else latent
    return node(
        "KSampler", model, 7, steps, cfg, sampler, "simple", known["positive"], known["negative"],
        latent, denoise,
    )[0]["samples"]  # fmt: skip


@torch.inference_mode()
def in_two(high, low, kind="wan21-t2v", *, at=2, steps=4, cfg=(1.0, 1.0), sampler="euler"):
    """The published graph: one KSamplerAdvanced for each expert, the noise left in between."""
    known = {"known": prompts(kind), "steps": steps, "sampler": sampler}
    between = advanced(
        "enable", model=high, latent=empty(kind), cfg=cfg[0], start=0, end=at, **known
    )
    return advanced("disable", model=low, latent=between, cfg=cfg[1], start=at, **known)["samples"]


def advanced(first, *, model, known, latent, steps, cfg, sampler, start, end=10000):
    """ComfyUI's KSamplerAdvanced, with leftover noise unless it runs to the end."""
    leftover = "disable" if end == 10000 else "enable"
    return node(
        "KSamplerAdvanced", model, first, 7, steps, cfg, sampler, "simple",
        known["positive"], known["negative"], latent, start, end, leftover,
    )[0]  # fmt: skip


def levels_of(model, steps, denoise=1.0):
    """The noise levels of ComfyUI's KSampler."""
    from comfy.samplers import KSampler

    known = {"sampler": "euler", "scheduler": "simple", "denoise": denoise}
    return KSampler(model, steps, torch.device("cpu"), **known).sigmas


@torch.inference_mode()
def custom(model, sigmas, latent, *, cfg, noise):
    """ComfyUI's SamplerCustom over some noise levels: the latent and the estimate."""
    from comfy.samplers import sampler_object

    return v3_node(
        "nodes_custom_sampler", "SamplerCustom", model=model, add_noise=noise, noise_seed=7,
        cfg=cfg, **prompts(), sampler=sampler_object("euler"), sigmas=torch.tensor(sigmas),
        latent_image=latent,
    )  # fmt: skip
