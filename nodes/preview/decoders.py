"""Decoding with the tiny decoders in ComfyUI's models/vae_approx.

Facts about ComfyUI here are from comfy/model_management.py and comfy/model_patcher.py of 0.33.
"""

import copy
import functools
from pathlib import Path
from typing import NamedTuple

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...vae import fastest_decode_dtype
from ...vae.preview import TinyDecoder, load_tiny_decoder
from ..host import timing
from ..host.oom import in_turn, kept
from ..host.progress import Progress
from .tiny_files import path_of


class TinyModel(NamedTuple):
    """A tiny decoder, and the object by which ComfyUI moves its weights."""

    decoder: TinyDecoder
    patcher: ModelPatcher


def tiny_model(name: str, channels: int) -> TinyModel:
    """Load the tiny decoder of a file for latents of `channels`; the last two are kept."""
    path = path_of(name)
    found = path.stat()
    model = _loaded(path, found.st_mtime_ns, found.st_size)
    expected = model.decoder.latent_channels
    if channels != expected:
        raise ValueError(
            f"{name} is for latents of {expected} channels; expected one for {channels}"
        )
    return model


def tiny_decoder_on(device: torch.device, name: str, channels: int) -> TinyDecoder:
    """Return a copy of a tiny decoder on `device`, which ComfyUI does not move."""
    return _copied(tiny_model(name, channels).decoder, device)


def decode(name: str, latent: Tensor) -> Tensor:
    """Decode raw `[B, C, t, h, w]` to an IMAGE `[B * (4 t - 3), H, W, 3]` with a tiny decoder."""
    model = tiny_model(name, latent.shape[1])
    decoder, device = model.decoder, model.patcher.load_device
    frames = 4 * latent.shape[2] - 3
    size = [length * decoder.spatial_compression for length in latent.shape[-2:]]
    shape = (latent.shape[0] * frames, *size, 3)
    with kept():
        images = empty_images(*shape)

    def go(on_cpu: bool) -> Tensor:
        loaded = _load(model, latent.shape, on_cpu=on_cpu)
        progress, at = Progress(len(images)), 0
        for video in latent:
            for piece in loaded.decode_stream(video[None]):
                frames = images[at : at + piece.shape[2]]
                frames.copy_(piece[0].movedim(0, -1)).clamp_(0, 1)
                at += len(frames)
                progress.passed(len(frames), frames)
        return images

    with timing.span("VAE decode", "tiny decoder", device):
        return in_turn(device, "a preview", go, "on the CPU")


def empty_images(*shape: int) -> Tensor:
    """Return memory for an IMAGE of `shape`, `[T, H, W, 3]` float32, on ComfyUI's device for it."""
    return torch.empty(shape, device=comfy.model_management.intermediate_device())


# On a CPU it is never float16: a decode took 4 to 6 times as long as in float32 (2026-11, AMD Zen
# 5).
def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of tiny decoders on `device`: ComfyUI's choice, on a CPU the fastest."""
    if device.type == "cpu":
        return fastest_decode_dtype(device)
    return comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16])


def _load(model: TinyModel, shape: torch.Size, *, on_cpu: bool) -> TinyDecoder:
    """Return the decoder on its device, or a copy on the CPU, for latents of `shape`."""
    management = comfy.model_management
    decoder, patcher = model
    if on_cpu:
        management.unload_model_and_clones(patcher)
        return _copied(decoder, torch.device("cpu"))
    memory_bytes = decoder.peak_bytes((1, *shape[1:]))
    management.load_models_gpu([patcher], memory_required=memory_bytes, force_full_load=True)
    if decoder.device.type != patcher.load_device.type:
        patcher.partially_load(patcher.load_device, extra_memory=1e32)
    return decoder


def _copied(decoder: TinyDecoder, device: torch.device) -> TinyDecoder:
    """Return a copy on `device`: a change of dtype would lose bits of the cached weights."""
    with torch.inference_mode(False):
        return copy.deepcopy(decoder).to(device, dtype_on(device))


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, changed_ns: int, size: int) -> TinyModel:
    management = comfy.model_management
    device, home = management.vae_device(), management.vae_offload_device()
    decoder = load_tiny_decoder(path, home, dtype_on(device))
    holder = nn.Module()  # ComfyUI notes values on the module of a patcher
    holder.decoder = decoder
    return TinyModel(decoder, ModelPatcher(holder, load_device=device, offload_device=home))
