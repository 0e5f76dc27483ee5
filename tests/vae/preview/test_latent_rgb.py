"""Colors of latents: the linear map of ComfyUI's factors, in bytes."""

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.vae.preview import rgb_of_latent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_colors_are_the_map_clamped_to_bytes(dtype):
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(16, 3, 4, 5, generator=generator).to(dtype)
    factors, bias = torch.randn(16, 3, generator=generator) / 4, [0.1, -0.2, 0.0]
    colors = rgb_of_latent(latent, factors.tolist(), bias)
    assert (colors.dtype, colors.shape) == (torch.uint8, (3, 4, 5, 3))
    exact = torch.einsum("cthw,cr->thwr", latent.double(), factors.double())
    exact = ((exact + torch.tensor(bias).double() + 1) / 2).clamp(0, 1) * 255
    assert (colors.double() - exact).abs().max() <= 1  # rounded down, as in ComfyUI
    assert colors.float().std() > 20


def test_factors_of_another_latent_are_refused():
    with refused(r"factors are \[4, 3\]; this latent needs \[16, 3\]"):
        rgb_of_latent(torch.zeros(16, 1, 2, 2), [[0.0] * 3] * 4)
