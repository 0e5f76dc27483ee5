"""What a run of the upscaler is asked for: the values of the widgets, and what they mean."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.utils
import torch
from comfy.ldm.seedvr import constants as law
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_post_processing import ResizeImageMaskNode
from comfy_extras.nodes_seedvr import SeedVR2Conditioning
from torch import Tensor

from ..host.error_text import described

_logger = logging.getLogger(__name__)

_NUMBERS = re.compile(r"\s*\d{1,9}(\s*[,;\s]\s*\d{1,9})*\s*[,;]?\s*")
# Sides of the frames that the model takes are multiples of this.
_MULTIPLE = 16
# Most latents of a window that is chosen: what an interruption loses, and the memory for it. Fewer
# than the least flicker from window to window.
_LEAST, _LONGEST = 5, 61


@dataclass(frozen=True)
class Wanted:
    """The values of the widgets, by their names (see their tooltips)."""

    multiplier: float
    shorter_side: int
    seed: int
    window: int
    overlap: int
    cuts: str
    color: str
    codec: str
    quality: int
    filename_prefix: str
    save_to: str
    bit_depth: str
    scale_method: str
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float

    def resized(self, images: Tensor) -> Tensor:
        """Return `[n, H, W, 3]` in [0, 1] at the new size, as of ComfyUI's Resize Image.

        Lanczos works in 8 bits and gives uint8: a quarter of the memory for frames that wait.
        """
        kind: dict[str, Any] = {"resize_type": "scale by multiplier", "multiplier": self.multiplier}
        if self.shorter_side:
            kind = {"resize_type": "scale shorter dimension", "shorter_size": self.shorter_side}
        images = ResizeImageMaskNode.execute(images, self.scale_method, kind).args[0]
        is_bytes = self.scale_method == "lanczos"
        return (images * 255).round().to(torch.uint8) if is_bytes else images

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the new height and width of frames, by those of a black one."""
        height, width = self.resized(torch.zeros(1, *size, 3)).shape[1:3]
        if min(height, width) < _MULTIPLE:
            name = "shorter_side" if self.shorter_side else "multiplier"
            raise ValueError(
                f"{name}: it makes {width} x {height} of {size[1]} x {size[0]}; "
                f"expected at least {_MULTIPLE} x {_MULTIPLE}"
            )
        return height, width

    def latents(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the latents of a window for frames of `size`, and those that two windows share."""
        length = (self.window - 1) // 4 + 1 if self.window else _fitting(size)
        return length, min(self.overlap, length - 1)

    def sampled(self, model: ModelPatcher, latent: Tensor, stepped: Callable[..., None]) -> Tensor:
        """Sample a window as KSampler does, conditioned on itself."""
        given = SeedVR2Conditioning.execute(model, {"samples": latent}).args
        how = self.steps, self.cfg, self.sampler_name, self.scheduler
        options = {"denoise": self.denoise, "seed": self.seed, "callback": stepped}
        options["disable_pbar"] = not comfy.utils.PROGRESS_BAR_ENABLED
        noise = comfy.sample.prepare_noise(latent, self.seed)
        return comfy.sample.sample(model, noise, *how, *given, latent, **options)


def check_window(window: int) -> None:
    """Check a number of frames."""
    if window and window % 4 != 1:
        raise ValueError(f"window: got {window} frames; expected 0, or 4 n + 1, such as 45 or 49")


def parsed_cuts(text: str) -> frozenset[int] | None:
    """Return the frames that begin a scene, as the user wrote them; None: they are to be found."""
    word = text.strip().lower()
    if word == "auto":
        return None
    if word not in ("", "none") and not _NUMBERS.fullmatch(text):
        raise ValueError(
            f"cuts is {described(text)}; expected auto, none, or frames, such as 48, 120"
        )
    return frozenset(map(int, re.findall(r"\d+", text))) - {0}


def padded_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of the frames that the VAE takes."""
    return -(-size[0] // _MULTIPLE) * _MULTIPLE, -(-size[1] // _MULTIPLE) * _MULTIPLE


def sampling_bytes(latents: int, size: tuple[int, int]) -> float:
    """Return the memory to sample a window, by the law of ComfyUI's Split SeedVR2 Latent."""
    gib = law.SEEDVR2_CHUNK_RESERVED_GIB + law.SEEDVR2_CHUNK_SIGMA_K * law.SEEDVR2_CHUNK_SIGMA_GIB
    per_latent = law.SEEDVR2_CHUNK_GIB_PER_MPX_FRAME * size[0] * size[1] / 1e6
    return (gib + latents * per_latent) * 2**30


def _fitting(size: tuple[int, int]) -> int:
    management = comfy.model_management
    free, none = management.get_free_memory(management.get_torch_device()), sampling_bytes(0, size)
    found = int((free - none) / (sampling_bytes(1, size) - none))
    if found < _LEAST:
        text = "Fast Video VAE: memory is short for frames of %d x %d; if it runs out, choose a "
        _logger.warning(text + "smaller size, or a window of 9 or 5 frames", size[1], size[0])
    return min(max(_LEAST, found), _LONGEST)
