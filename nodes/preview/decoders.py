"""Decoding with the tiny decoders in ComfyUI's models/vae_approx.

Facts about ComfyUI here are from comfy/model_management.py and comfy/model_patcher.py of 0.33.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...vae import preview
from ..host import timing
from ..host.oom import Way, in_turn, kept
from ..host.progress import Progress
from .tiny_files import path_of

if TYPE_CHECKING:
    from ...vae.preview import TinyDecoder

_WAYS = [
    Way(""),
    Way("with all models unloaded"),
    Way("on the CPU", on_host=True),
]


class TinyModel(NamedTuple):
    """A tiny decoder, and the object by which ComfyUI moves its weights."""

    decoder: "TinyDecoder"
    patcher: ModelPatcher


def tiny_model(name: str) -> TinyModel:
    """Load a tiny decoder; the last two are kept.

    Args:
        name: File in models/vae_approx.

    Returns:
        The decoder, on ComfyUI's offload device for VAEs.

    Raises:
        OSError: The file is missing or cannot be opened.
        ValueError: It is not a tiny decoder.
    """
    path = path_of(name)
    found = path.stat()
    return _loaded(path, found.st_mtime_ns, found.st_size)


def decoded(name: str, latent: Tensor) -> Tensor:
    """Decode latents to an IMAGE with a tiny decoder, with progress bar and retries.

    Args:
        name: File in models/vae_approx.
        latent: `[B, C, t, h, w]`, raw.

    Returns:
        `[B * (4 t - 3), H, W, 3]`, float32 in [0, 1], on the output device.

    Raises:
        OSError: The file is missing or cannot be opened.
        ValueError: It is not a tiny decoder, or one for other latents.
        torch.OutOfMemoryError: Memory is short even on the CPU.
    """
    model = tiny_model(name)
    decoder, device = model.decoder, model.patcher.load_device
    decoder.decode_stream(latent)  # checks it
    frames = 4 * latent.shape[2] - 3
    size = [length * decoder.spatial_compression for length in latent.shape[-2:]]
    shape = (latent.shape[0] * frames, *size, 3)
    with kept():
        output = comfy.model_management.intermediate_device()
        images = torch.empty(shape, dtype=torch.float32, device=output)

    def go(way: Way) -> Tensor:
        load(model, latent.shape, way)
        progress, at = Progress(len(images)), 0
        for video in latent:
            for piece in decoder.decode_stream(video[None]):
                part = images[at : at + piece.shape[2]]
                part.copy_(piece[0].movedim(0, -1)).clamp_(0, 1)
                at += len(part)
                progress.passed(len(part), part)
        return images

    ways = [way for way in _WAYS if device.type != "cpu" or not way.on_host]
    with timing.span("VAE decode", "tiny decoder", device):
        return in_turn([device], "a preview", ways, go)


def load(model: TinyModel, shape: torch.Size, way: Way = _WAYS[0]) -> None:
    """Load the weights of `model` to the device of `way`, for latents of `shape`."""
    management = comfy.model_management
    decoder, patcher = model
    if way.on_host:
        management.unload_model_and_clones(patcher)
        decoder.to("cpu")
        return
    memory_bytes = decoder.peak_bytes((1, *shape[1:]))
    management.load_models_gpu([patcher], memory_required=memory_bytes, force_full_load=True)
    if decoder.device.type != patcher.load_device.type:
        patcher.partially_load(patcher.load_device, extra_memory=1e32)


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, changed_ns: int, size: int) -> TinyModel:
    management = comfy.model_management
    device, home = management.vae_device(), management.vae_offload_device()
    decoder = preview.load_tiny_decoder(path, home, dtype_on(device))
    holder = nn.Module()  # ComfyUI notes values on the module of a patcher
    holder.decoder = decoder
    return TinyModel(decoder, ModelPatcher(holder, load_device=device, offload_device=home))


def dtype_on(device: torch.device) -> torch.dtype:
    """Return ComfyUI's choice of a dtype for VAEs on `device`, which its command line sets."""
    return comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16])
