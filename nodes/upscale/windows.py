"""Windows of latents that overlap, as ComfyUI's Split and Merge SeedVR2 Latent have them."""

import dataclasses
import logging

import comfy.model_management
import torch
from comfy.ldm.seedvr import constants
from comfy_extras.nodes_seedvr import SeedVR2TemporalMerge
from torch import Tensor

_logger = logging.getLogger(__name__)

# Most latents of a window that is chosen: what an interruption loses, and the memory for it. Fewer
# than the least flicker from window to window.
_LEAST, _LONGEST = 5, 61


@dataclasses.dataclass(frozen=True)
class Windows:
    """Window `n` of a scene has `length` latents, the first of which is `n * step`."""

    length: int
    overlap: int  # latents that two windows share; fewer than `length`

    @property
    def step(self) -> int:
        """Latents from a window to the next one."""
        return self.length - self.overlap

    def final(self, window: int, filled: int, *, is_last: bool) -> int:
        """Return how many of the `filled` latents of a scene no later window changes."""
        return filled if is_last else (window + 1) * self.step

    def merged(self, before: Tensor, latent: Tensor) -> Tensor:
        """Cross-fade the latents of a scene `before` with those of the next window."""
        if not before.shape[2]:
            return latent
        last = before[:, :, -self.length :]
        parts = [{"samples": last}, {"samples": latent}]
        joined = SeedVR2TemporalMerge.execute(parts, [self.overlap]).args[0]["samples"]
        return torch.cat([before[:, :, : before.shape[2] - last.shape[2]], joined], dim=2)


def windows(frames: int, overlap: int, size: tuple[int, int]) -> Windows:
    """Return windows of a number of frames; 0: as many as the free memory allows.

    The number that fits is by the law of ComfyUI's Split SeedVR2 Latent, for frames of `size`.
    """
    length = (frames - 1) // 4 + 1 if frames else _fitting(size)
    return Windows(length, min(overlap, length - 1))


def sampling_bytes(latents: int, size: tuple[int, int]) -> float:
    """Return the memory that ComfyUI's law reserves to sample a window."""
    law = constants
    gib = law.SEEDVR2_CHUNK_RESERVED_GIB + law.SEEDVR2_CHUNK_SIGMA_K * law.SEEDVR2_CHUNK_SIGMA_GIB
    return (gib + latents * law.SEEDVR2_CHUNK_GIB_PER_MPX_FRAME * _megapixels(size)) * 2**30


def _fitting(size: tuple[int, int]) -> int:
    management = comfy.model_management
    free = management.get_free_memory(management.get_torch_device()) - sampling_bytes(0, size)
    per_latent = constants.SEEDVR2_CHUNK_GIB_PER_MPX_FRAME * _megapixels(size) * 2**30
    found = int(free / per_latent)
    if found < _LEAST:
        text = "Fast Video VAE: memory is short for frames of %d x %d; if it runs out, choose a "
        _logger.warning(text + "smaller size, or a window of 9 or 5 frames", size[1], size[0])
    return min(max(_LEAST, found), _LONGEST)


def _megapixels(size: tuple[int, int]) -> float:
    return size[0] * size[1] / 1e6
