"""Runs of a sampler whose preview is tested in this process."""

import threading

import torch

from fast_video_vae.tests.nodes.sampling.sampler_models import run

STEPS = 4


def clip(frames=3, side=8):
    return {"samples": torch.zeros(1, 16, frames, side, side)}


def sampled(**given):
    return run(steps=STEPS, **({"latent_image": clip()} | given))


def bytes_of(images):
    return {image.tobytes() for image in images}


def threads():
    return [each.name for each in threading.enumerate() if each.name == "fast-vae-preview"]


def failing(error):
    def fails(*given, **options):
        raise error

    return fails
