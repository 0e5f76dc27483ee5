"""Latents that do not fill the patches of the model: one line, with the sizes that do."""

import types

import pytest
import torch

from fast_video_vae.tests.nodes.sampling.sampler_models import expert, prompts, run

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]

LINE = (
    "Fast Video VAE: the latent has {} rows and {} columns; this model needs {}, so ComfyUI "
    "repeats the opposite edge, which can show. In pixels: {}"
)


def of_size(height, width, channels=16, frames=3):
    return {"samples": torch.zeros(1, channels, frames, height, width)}


def check(found, words, needs="even numbers"):
    expected = [] if words is None else [LINE.format(*words[:2], needs, words[2])]
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "channels", "size", "fits"),
    [
        ("wan21-t2v", 16, (8, 6), None),
        ("wan21-t2v", 16, (7, 6), "height 48 or 64"),
        ("wan21-t2v", 16, (6, 1), "width 16"),
        ("wan22-5b", 48, (5, 6), "height 64 or 96"),
        ("wan22-5b", 48, (5, 3), "height 64 or 96, width 32 or 64"),
        ("qwen-image", 16, (5, 6), "height 32 or 48"),  # whose patch is one number
    ],
)
def test_a_size_that_the_model_cuts_is_logged_once(size_lines, kind, channels, size, fits):
    one = {"model_high": expert(kind), "model_low": None}
    latent = of_size(*size, channels, 1 if kind == "qwen-image" else 3)
    for seed in (1, 2):
        result = run(kind, **one, latent_image=latent, seed=seed, steps=2, shift_high="auto")
        assert result["LATENT"]["samples"].shape == latent["samples"].shape
        check(size_lines(), fits and (*size, fits))


def test_both_experts_log_it_once(size_lines):
    run(latent_image=of_size(5, 8))
    check(size_lines(), (5, 8, "height 32 or 48"))


@pytest.mark.parametrize(
    ("patch", "of_network", "size", "words", "needs"),
    [
        ((1, 4, 4), {}, (6, 8), (6, 8, "height 32 or 64"), "multiples of 4"),
        ([1, 2, 2], {}, (6, 7), (6, 7, "width 48 or 64"), "even numbers"),
        ((1, 1, 1), {}, (5, 7), None, ""),
        (1, {}, (5, 7), None, ""),
        (2, {"in_channels": 64}, (5, 6), (5, 6, "height 32 or 48"), "even numbers"),
        (2, {"in_channels": 16}, (5, 6), None, ""),  # a latent pixel is a patch
        (None, {}, (5, 7), None, ""),
        ("2", {}, (5, 7), None, ""),
        ([2], {}, (5, 7), None, ""),
    ],
)
def test_the_patch_is_that_of_the_model(
    size_lines, monkeypatch, patch, of_network, size, words, needs
):
    from fast_video_vae.nodes.sampling import run as of_sampler

    model = expert()
    network = types.SimpleNamespace(patch_size=patch, **of_network)
    monkeypatch.setitem(model.model._modules, "diffusion_model", network)
    of_sampler._checked_latent([model], of_size(*size))
    check(size_lines(), words, needs)


def test_sound_has_no_rows(size_lines, monkeypatch):
    from fast_video_vae.nodes.sampling import run as of_sampler

    model = expert()
    monkeypatch.setitem(
        model.model._modules, "diffusion_model", types.SimpleNamespace(patch_size=(1, 2))
    )
    of_sampler._checked_latent([model], {"samples": torch.zeros(1, 16, 7)})
    assert size_lines() == []


@torch.inference_mode()
def test_comfyui_repeats_the_opposite_edge():
    """What the line says: of a Wan model, with that edge in the latent the result is the same."""
    network = expert().model.diffusion_model
    context = prompts()["positive"][0][0].float()
    x = torch.randn(1, 16, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    grown = torch.cat([x, x[..., :1, :]], dim=3)
    time = torch.tensor([500.0])
    found, expected = (network(each, time, context) for each in (x, grown))
    assert (found - expected[..., :5, :]).abs().max() <= 1e-5 * expected.abs().max()
