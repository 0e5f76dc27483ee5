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

from .api import InputImpl
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
        raise _unexpected(value, _LATENT)
    samples = value["samples"]
    # ComfyUI's class for several tensors in one is not a tensor.
    parts = list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]
    if not parts:
        raise ValueError(f"its 'samples' hold no tensor; expected {_LATENT}")
    for part in parts:
        _floats(part, _LATENT, "its 'samples' are")
        if not 3 <= part.ndim <= 5:
            size = f"{part.ndim} dimensions, {list(part.shape)}"
            raise ValueError(f"its 'samples' have {size}; expected {_LATENT}")
        frames = part.reshape(*part.shape[:2], *(1,) * (5 - part.ndim), *part.shape[2:])
        vaes.check_finite(frames, "latent")
    if value.get("noise_mask") is not None:
        mask = "a float tensor [B, H, W], or none"
        _floats(value["noise_mask"], mask, "its 'noise_mask' is")
    return value


def image(value: object) -> Tensor:
    """Return an IMAGE `[N, H, W, C]`, or a batch of videos `[B, T, H, W, C]`."""
    tensor = _floats(value, _IMAGE)
    if tensor.ndim not in (4, 5):
        raise _unexpected(tensor, "[N, H, W, C]")
    return tensor


def audio(value: object) -> Mapping[str, Any]:
    """Return an AUDIO, which can be a mapping that reads its file on access."""
    if not isinstance(value, Mapping) or not {"waveform", "sample_rate"} <= set(value):
        raise _unexpected(value, _AUDIO)
    waveform, rate = value["waveform"], value["sample_rate"]
    _tensor(waveform, "[1, channels, samples]", "its waveform is")
    if waveform.ndim != 3 or not all(waveform.shape[:2]) or not waveform.is_floating_point():
        raise _unexpected(waveform, "[1, channels, samples], floats", "its waveform is")
    if not isinstance(rate, Real) or not 1 <= rate <= 768_000:
        raise _unexpected(rate, "1 to 768000", "its sample_rate is")
    return value


def video(value: object) -> object:
    """Return a VIDEO; if it has tensors, they are checked too."""
    methods = "get_components", "get_stream_source", "get_active_trim_window"
    _having(value, methods, "a VIDEO, as from Load Video")
    if isinstance(value, InputImpl.VideoFromComponents):
        parts = value.get_components()
        with about("its images"):
            image(parts.images)
        if not isinstance(parts.frame_rate, Real) or not 0 < parts.frame_rate < float("inf"):
            raise _unexpected(parts.frame_rate, "more than 0", "its frame rate is")
        if parts.audio is not None:
            audio(parts.audio)
    return value


def vae(value: object) -> object:
    """Return a VAE of ComfyUI, or an object of another pack with `encode` or `decode`."""
    if isinstance(value, comfy.sd.VAE):
        if value.first_stage_model is None:
            raise ValueError("its file has no VAE; expected one: load the VAE from its own file")
        return value
    if isinstance(value, (str, bytes, bytearray)):  # text has methods with these names
        raise _unexpected(value, "a VAE")
    if callable(getattr(value, "decode", None)):
        return value
    return _having(value, ("encode",), f"a VAE{_own_file(value)}")


def model(value: object) -> ModelPatcher:
    """Return a MODEL."""
    if not isinstance(value, ModelPatcher):
        raise _unexpected(value, "a MODEL, as from Load Diffusion Model")
    return value


def clip(value: object) -> object:
    """Return a CLIP of ComfyUI, or an object of another pack with its methods."""
    methods = "tokenize", "encode_from_tokens_scheduled"
    return _having(value, methods, f"a text encoder{_own_file(value)}")


def conditioning(value: object) -> list:
    """Return a CONDITIONING, which can be empty."""
    if not isinstance(value, (list, tuple)):
        raise _unexpected(value, _CONDITIONING)
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) < 2 or not isinstance(pair[1], Mapping):
            raise _unexpected(pair, _CONDITIONING, "it holds")
        if pair[0] is not None:  # some models need no text
            tensor = _floats(pair[0], _CONDITIONING, "it holds")
            # PyTorch has no `isfinite` for floats of 8 bits.
            if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
                raise ValueError("its tensors hold NaN or infinity; expected finite values")
    return value


def sigmas(value: object) -> Tensor:
    """Return SIGMAS `[n]` of any length."""
    tensor = _tensor(value, "SIGMAS, a tensor of noise levels")
    if tensor.ndim != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise _unexpected(tensor, "SIGMAS, a tensor of one dimension")
    return tensor


def lora_stack(value: object) -> tuple:
    """Return the entries of the output of LoRA Stack (Fast)."""
    entries = isinstance(value, (list, tuple)) and all(
        isinstance(each, lora.StackEntry) for each in value
    )
    if not entries:
        raise _unexpected(value, "the output of LoRA Stack (Fast)")
    return tuple(value)


TYPES: dict[str, Callable[[object], object]] = {
    "FASTVAE_LORA_STACK": lora_stack,
    **{
        check.__name__.upper(): check
        for check in (latent, image, audio, video, vae, model, clip, conditioning, sigmas)
    },
}


def _unexpected(value: object, expected: str, what: str = "got") -> ValueError:
    return ValueError(f"{what} {described(value)}; expected {expected}")


def _own_file(value: object) -> str:
    return "" if value is not None else ". The checkpoint has none: load it from its own file"


def _having(value: object, methods: tuple[str, ...], expected: str) -> object:
    """Check that a value has methods, whatever its class."""
    if not all(callable(getattr(value, name, None)) for name in methods):
        raise _unexpected(value, expected)
    return value


def _tensor(value: object, expected: str, what: str = "got") -> Tensor:
    """Check that a value is a dense tensor: not sparse, nested or without memory."""
    is_dense = isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided
    if not is_dense or value.is_meta or value.is_quantized:
        raise _unexpected(value, expected, what)
    return value


def _floats(value: object, expected: str, what: str = "got") -> Tensor:
    tensor = _tensor(value, expected, what)
    if not tensor.is_floating_point() or not tensor.numel():
        raise _unexpected(tensor, expected, what)
    return tensor
