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


def _latent(value: object) -> Mapping[str, Any]:
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


def _image(value: object) -> Tensor:
    tensor = _floats(value, _IMAGE)
    if tensor.ndim not in (4, 5):  # [B, T, H, W, C]: a batch of videos
        raise _unexpected(tensor, "[N, H, W, C]")
    return tensor


# It can be a mapping that reads its file on access.
def _audio(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not {"waveform", "sample_rate"} <= set(value):
        raise _unexpected(value, _AUDIO)
    waveform, rate = value["waveform"], value["sample_rate"]
    _tensor(waveform, "[1, channels, samples]", "its waveform is")
    if waveform.ndim != 3 or not all(waveform.shape[:2]) or not waveform.is_floating_point():
        raise _unexpected(waveform, "[1, channels, samples], floats", "its waveform is")
    if not isinstance(rate, Real) or not 1 <= rate <= 768_000:
        raise _unexpected(rate, "1 to 768000", "its sample_rate is")
    return value


def _video(value: object) -> object:
    methods = "get_components", "get_stream_source", "get_active_trim_window"
    _having(value, methods, "a VIDEO, as from Load Video")
    if isinstance(value, InputImpl.VideoFromComponents):
        parts = value.get_components()
        with about("its images"):
            _image(parts.images)
        if not isinstance(parts.frame_rate, Real) or not 0 < parts.frame_rate < float("inf"):
            raise _unexpected(parts.frame_rate, "more than 0", "its frame rate is")
        if parts.audio is not None:
            _audio(parts.audio)
    return value


def _vae(value: object) -> object:
    if isinstance(value, comfy.sd.VAE):
        if value.first_stage_model is None:
            raise ValueError("its file has no VAE; expected one: load the VAE from its own file")
        return value
    if isinstance(value, (str, bytes, bytearray)):  # text has methods with these names
        raise _unexpected(value, "a VAE")
    method = "decode" if callable(getattr(value, "decode", None)) else "encode"
    return _having(value, (method,), f"a VAE{_own_file(value)}")


def _model(value: object) -> ModelPatcher:
    if not isinstance(value, ModelPatcher):
        raise _unexpected(value, "a MODEL, as from Load Diffusion Model")
    return value


def _clip(value: object) -> object:
    methods = "tokenize", "encode_from_tokens_scheduled"
    return _having(value, methods, f"a text encoder{_own_file(value)}")


def _conditioning(value: object) -> list:
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


def _sigmas(value: object) -> Tensor:
    tensor = _tensor(value, "SIGMAS, a tensor of noise levels")
    if tensor.ndim != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise _unexpected(tensor, "SIGMAS, a tensor of one dimension")
    return tensor


def _lora_stack(value: object) -> tuple:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(each, lora.StackEntry) for each in value):
        raise _unexpected(value, "the output of LoRA Stack (Fast)")
    return tuple(value)


TYPES: dict[str, Callable[[object], object]] = {
    "LATENT": _latent,
    "IMAGE": _image,
    "AUDIO": _audio,
    "VIDEO": _video,
    "VAE": _vae,
    "MODEL": _model,
    "CLIP": _clip,
    "CONDITIONING": _conditioning,
    "SIGMAS": _sigmas,
    "FASTVAE_LORA_STACK": _lora_stack,
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
