"""Checks of the types of ComfyUI's links, as far as the nodes of this pack rely on them.

Each check takes any value and returns it, or raises a `ValueError` with what came and what was
expected; the caller adds the name of the input.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from .api import Input, InputImpl
from .error_text import about, described
from .lazy import Later

lora, vaes = Later("lora"), Later("vae")

_LATENT = "a LATENT, which is a dict with a tensor [B, C, t, h, w] as 'samples'"
_IMAGE = "an IMAGE, which is a float tensor [N, H, W, C] in [0, 1]"
_AUDIO = "an AUDIO, which is a dict with 'waveform' and 'sample_rate'"
_CONDITIONING = "a CONDITIONING, which is a list of pairs of a tensor and a dict"


def latent(value: object) -> Mapping[str, Any]:
    """Return a LATENT: finite floats, `[B, C, t, h, w]`, `[B, C, h, w]` or three dimensions."""
    if not isinstance(value, Mapping) or "samples" not in value:
        raise ValueError(f"got {described(value)}; expected {_LATENT}")
    samples = value["samples"]
    # ComfyUI's class for several tensors in one is not a tensor.
    nested = getattr(samples, "is_nested", False)
    parts = list(samples.unbind()) if nested else [samples]
    if not parts:
        raise ValueError(f"its 'samples' hold no tensor; expected {_LATENT}")
    for part in parts:
        _floats(part, "its 'samples' are {}; expected " + _LATENT)
        if not 3 <= part.ndim <= 5:
            raise ValueError(
                f"its 'samples' have {part.ndim} dimensions, {list(part.shape)}; expected {_LATENT}"
            )
        frames = part.reshape(*part.shape[:2], *(1,) * (5 - part.ndim), *part.shape[2:])
        vaes.check_finite(frames, "latent")
    mask = value.get("noise_mask")
    if mask is not None:
        _floats(mask, "its 'noise_mask' is {}; expected a float tensor [B, H, W], or none")
    return value


def image(value: object) -> Tensor:
    """Return an IMAGE `[N, H, W, C]`, or a batch of videos `[B, T, H, W, C]`."""
    tensor = _floats(value, "got {}; expected " + _IMAGE)
    if tensor.ndim not in (4, 5):
        raise ValueError(f"got {described(tensor)}; expected [N, H, W, C]")
    return tensor


def audio(value: object) -> Mapping[str, Any]:
    """Return an AUDIO, which can be a mapping that reads its file on access."""
    if not isinstance(value, Mapping) or not {"waveform", "sample_rate"} <= set(value):
        raise ValueError(f"got {described(value)}; expected {_AUDIO}")
    waveform, rate = value["waveform"], value["sample_rate"]
    _tensor(waveform, "its waveform is {}; expected [1, channels, samples]")
    if waveform.ndim != 3 or not all(waveform.shape[:2]) or not waveform.is_floating_point():
        raise ValueError(
            f"its waveform is {described(waveform)}; expected [1, channels, samples], floats"
        )
    if not isinstance(rate, Real) or not 1 <= rate <= 768_000:
        raise ValueError(f"its sample_rate is {described(rate)}; expected 1 to 768000")
    return value


def video(value: object) -> Input.Video:
    """Return a VIDEO; if it has tensors, they are checked too."""
    methods = "get_components", "get_stream_source", "get_active_trim_window"
    if not all(callable(getattr(value, name, None)) for name in methods):
        raise ValueError(f"got {described(value)}; expected a VIDEO, as from Load Video")
    if isinstance(value, InputImpl.VideoFromComponents):
        parts = value.get_components()
        with about("its images"):
            image(parts.images)
        if not isinstance(parts.frame_rate, Real) or not 0 < parts.frame_rate < float("inf"):
            raise ValueError(
                f"its frame rate is {described(parts.frame_rate)}; expected more than 0"
            )
        if parts.audio is not None:
            audio(parts.audio)
    return value


def vae(value: object) -> object:
    """Return a VAE of ComfyUI, or an object of another pack with `encode` or `decode`."""
    if isinstance(value, comfy.sd.VAE):
        if value.first_stage_model is None:
            raise ValueError("its file has no VAE; expected one: load the VAE from its own file")
        return value
    # text has methods with these names
    works = any(callable(getattr(value, name, None)) for name in ("decode", "encode"))
    if isinstance(value, (str, bytes, bytearray)) or not works:
        hint = ". The checkpoint has none: load it from its own file" if value is None else ""
        raise ValueError(f"got {described(value)}; expected a VAE{hint}")
    return value


def model(value: object) -> ModelPatcher:
    """Return a MODEL."""
    if not isinstance(value, ModelPatcher):
        raise ValueError(f"got {described(value)}; expected a MODEL, as from Load Diffusion Model")
    return value


def clip(value: object) -> object:
    """Return a CLIP of ComfyUI, or an object of another pack with its methods."""
    methods = "tokenize", "encode_from_tokens_scheduled"
    if not all(callable(getattr(value, name, None)) for name in methods):
        hint = ". The checkpoint has none: load it from its own file" if value is None else ""
        raise ValueError(f"got {described(value)}; expected a text encoder{hint}")
    return value


def conditioning(value: object) -> list:
    """Return a CONDITIONING, which can be empty."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"got {described(value)}; expected {_CONDITIONING}")
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) < 2 or not isinstance(pair[1], Mapping):
            raise ValueError(f"it holds {described(pair)}; expected {_CONDITIONING}")
        if pair[0] is not None:  # some models need no text
            _floats(pair[0], "it holds {}; expected " + _CONDITIONING)
            _finite(pair[0], "its tensors")
    return value


def sigmas(value: object) -> Tensor:
    """Return SIGMAS `[n]` of any length."""
    tensor = _tensor(value, "got {}; expected SIGMAS, a tensor of noise levels")
    if tensor.ndim != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"got {described(tensor)}; expected SIGMAS, a tensor of one dimension")
    return tensor


def lora_stack(value: object) -> tuple:
    """Return the entries of the output of LoRA Stack (Fast)."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, lora.StackEntry) for each in value
    ):
        raise ValueError(f"got {described(value)}; expected the output of LoRA Stack (Fast)")
    return tuple(value)


TYPES: dict[str, Callable[[object], object]] = {
    "LATENT": latent,
    "IMAGE": image,
    "AUDIO": audio,
    "VIDEO": video,
    "VAE": vae,
    "MODEL": model,
    "CLIP": clip,
    "CONDITIONING": conditioning,
    "SIGMAS": sigmas,
    "FASTVAE_LORA_STACK": lora_stack,
}


def _tensor(value: object, message: str) -> Tensor:
    """Check that a value is a dense tensor: not sparse, nested or without memory."""
    is_dense = isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided
    if is_dense and not (value.is_meta or value.is_quantized):
        return value
    raise ValueError(message.format(described(value)))


def _finite(tensor: Tensor, name: str) -> None:
    # PyTorch has no `isfinite` for floats of 8 bits.
    if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
        raise ValueError(f"{name} hold NaN or infinity; expected finite values")


def _floats(value: object, message: str) -> Tensor:
    tensor = _tensor(value, message)
    if not tensor.is_floating_point() or not tensor.numel():
        raise ValueError(message.format(described(tensor)))
    return tensor
