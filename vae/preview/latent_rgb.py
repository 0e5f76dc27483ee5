"""The rough colors of a latent: a linear map from its channels to red, green and blue.

ComfyUI keeps such factors for each latent format (`latent_rgb_factors` and their bias in
comfy/latent_formats.py), fitted to latents as the diffusion model sees them; the result of a
factor's map is in about [-1, 1].
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def rgb_of_latent(
    latent: Tensor,
    factors: Sequence[Sequence[float]] | Tensor,
    bias: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Map `[C, T, h, w]`, normalised, by `factors` `[C, 3]` to `[T, h, w, 3]` uint8, on its device.

    Nothing waits for the device.
    """
    # On a CPU half precision products are slow; three products per pixel cost nothing in float32.
    weight = torch.as_tensor(factors, dtype=torch.float32).to(latent.device, non_blocking=True)
    if weight.shape != (latent.shape[0], 3):
        raise ValueError(
            f"factors are {list(weight.shape)}; this latent needs [{latent.shape[0]}, 3]"
        )
    colors = latent.float().movedim(0, -1) @ weight
    if bias is not None:
        offset = torch.as_tensor(bias, dtype=torch.float32)
        colors = colors + offset.to(latent.device, non_blocking=True)
    return colors.add_(1).mul_(127.5).clamp_(0, 255).to(torch.uint8)
