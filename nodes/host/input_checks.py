"""Checks of the inputs of a node by type, before any work is done.

ComfyUI compares types by name, and checks the range of a widget only if no link goes into it. So
another pack's node or a prompt over HTTP can pass any value to any input. A check takes any value
and returns it, or raises a `ValueError` with what came and what was expected.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Real

import comfy.sd
import torch
from comfy.model_management import get_torch_device
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from .api import InputImpl, io
from .devices import OpenInput
from .error_text import LARGEST, about, one_line, require
from .lazy import Later

lora, vaes = Later("lora"), Later("vae")

_LATENT = "a LATENT, which is a dict with a tensor [B, C, t, h, w] as 'samples'"
_IMAGE = "an IMAGE, which is a float tensor [N, H, W, C] in [0, 1]"
_AUDIO = "an AUDIO, which is a dict with 'waveform' and 'sample_rate'"
_CONDITIONING = "a CONDITIONING, which is a list of pairs of a tensor and a dict"
_MODEL = "a MODEL, as from Load Diffusion Model"
_NONE = ". The checkpoint has none: load it from its own file"


# An optional input that is None counts as not given: it gets the default of `execute`. An unknown
# input, such as a removed one in a saved workflow, is ignored: ComfyUI drops its value, but not a
# link into it.
def checked(execute: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    """Check all arguments of `execute`, below its `@classmethod`, against its node's schema."""
    signature = inspect.signature(execute)

    @functools.wraps(execute)
    def run(cls: type[io.ComfyNode], *args: object, **kwargs: object) -> io.NodeOutput:
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        given = signature.bind(cls, *args, **known)
        schema = cls.define_schema()
        try:
            for each in schema.inputs:
                _check(each, given.arguments, is_list=schema.is_input_list)
            return execute(*given.args, **given.kwargs)
        except ValueError as error:
            text = one_line(str(error))
            if text == str(error):
                raise
            raise ValueError(text) from error

    return run


# ComfyUI reports the returned error once for each argument of `validate_inputs`, under the name of
# that input, and has no way to report it for one input only. An exception is no better: it is
# reported for an input of the next node. So the error says which inputs are wrong, and there is a
# check for each argument.
def check_text(checks: Mapping[str, Callable[[], object]]) -> bool | str:
    """Return True, or the errors of a node's texts in one line, for `validate_inputs`."""
    errors: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
        except ValueError as error:
            errors[name] = str(error) if str(error).startswith(name) else f"{name}: {error}"
    if not errors:
        return True
    text = one_line("; ".join(errors.values()))
    verb = "is" if len(errors) == 1 else "are"
    only = f" (only {' and '.join(errors)} {verb} wrong)"
    return text if len(errors) == len(checks) else text + only


def _check(spec: io.Input, given: dict[str, object], *, is_list: bool) -> None:
    value = given.get(spec.id)
    if value is None and (spec.optional or spec.id not in given):
        given.pop(spec.id, None)
        return
    with about(spec.id):
        if is_list:
            require(isinstance(value, list), value, "a list")
        given[spec.id] = [_value(spec, each) for each in value] if is_list else _value(spec, value)


def _value(spec: io.Input, value: object) -> object:
    is_number = isinstance(value, Real)
    if isinstance(spec, OpenInput):
        return spec.check(value)
    if isinstance(spec, io.Combo.Input):
        more = f" and {len(spec.options) - 6} more" if spec.options[6:] else ""
        known = f"{', '.join(spec.options[:6])}{more}" or "(there are no choices)"
        return require(isinstance(value, str) and value in spec.options, value, f"one of: {known}")
    if isinstance(spec, (io.Int.Input, io.Float.Input)):
        # An integer may arrive as a float without a fraction. NaN is in no range.
        kind, words = (int, "whole number") if isinstance(spec, io.Int.Input) else (float, "number")
        fits = is_number and spec.min <= value <= spec.max and (kind is float or value % 1 == 0)
        return kind(require(fits, value, f"a {words} from {spec.min} to {spec.max}"))
    if isinstance(spec, io.String.Input):
        if isinstance(value, str):
            return value
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        return str(require(fits and abs(value) < LARGEST, value, "text"))
    if isinstance(spec, io.Boolean.Input):
        return bool(require(is_number and value in (0, 1), value, "true or false"))
    check = functools.partial(TYPES[spec.get_io_type()], value)
    return vaes.retried(check, get_torch_device(), "the check of an input")


def _latent(value: object) -> object:
    require(isinstance(value, Mapping) and "samples" in value, value, _LATENT)
    samples = value["samples"]
    # ComfyUI's class for several tensors in one is not a tensor.
    parts = list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]
    if not parts:
        raise ValueError(f"its 'samples' hold no tensor; expected {_LATENT}")
    for part in parts:
        _tensor(part, _LATENT, "its 'samples' are")
        if not 3 <= part.ndim <= 5:
            size = f"{part.ndim} dimensions, {list(part.shape)}"
            raise ValueError(f"its 'samples' have {size}; expected {_LATENT}")
        frames = part.reshape(*part.shape[:2], *(1,) * (5 - part.ndim), *part.shape[2:])
        vaes.check_finite(frames, "latent")
    if value.get("noise_mask") is not None:
        _tensor(value["noise_mask"], "a float tensor [B, H, W], or none", "its 'noise_mask' is")
    return value


def _image(value: object) -> Tensor:
    is_image = _tensor(value, _IMAGE).ndim in (4, 5)  # [B, T, H, W, C]: a batch of videos
    return require(is_image, value, "[N, H, W, C]")


# It can be a mapping that reads its file on access.
def _audio(value: object) -> object:
    is_audio = isinstance(value, Mapping) and {"waveform", "sample_rate"} <= set(value)
    require(is_audio, value, _AUDIO)
    sound, rate = value["waveform"], value["sample_rate"]
    _tensor(sound, "[1, channels, samples]", "its waveform is", floats=False)
    fits = sound.ndim == 3 and all(sound.shape[:2]) and sound.is_floating_point()
    require(fits, sound, "[1, channels, samples], floats", "its waveform is")
    fits = isinstance(rate, Real) and 1 <= rate <= 768_000
    require(fits, rate, "1 to 768000", "its sample_rate is")
    return value


def _video(value: object) -> object:
    methods = "get_components", "get_stream_source", "get_active_trim_window"
    require(_has(value, *methods), value, "a VIDEO, as from Load Video")
    if isinstance(value, InputImpl.VideoFromComponents):
        parts = value.get_components()
        with about("its images"):
            _image(parts.images)
        is_rate = isinstance(parts.frame_rate, Real) and 0 < parts.frame_rate < float("inf")
        require(is_rate, parts.frame_rate, "more than 0", "its frame rate is")
        if parts.audio is not None:
            _audio(parts.audio)
    return value


def _vae(value: object) -> object:
    if isinstance(value, comfy.sd.VAE):
        if value.first_stage_model is None:
            raise ValueError("its file has no VAE; expected one: load the VAE from its own file")
        return value
    is_text = isinstance(value, (str, bytes, bytearray))  # has methods with these names
    is_vae = not is_text and (_has(value, "decode") or _has(value, "encode"))
    return require(is_vae, value, "a VAE" + _NONE * (value is None))


def _clip(value: object) -> object:
    is_clip = _has(value, "tokenize", "encode_from_tokens_scheduled")
    return require(is_clip, value, "a text encoder" + _NONE * (value is None))


def _conditioning(value: object) -> object:
    require(isinstance(value, (list, tuple)), value, _CONDITIONING)
    for pair in value:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) > 1 and isinstance(pair[1], Mapping)
        require(is_pair, pair, _CONDITIONING, "it holds")
        if pair[0] is not None:  # some models need no text
            tensor = _tensor(pair[0], _CONDITIONING, "it holds")
            # PyTorch has no `isfinite` for floats of 8 bits.
            if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
                raise ValueError("its tensors hold NaN or infinity; expected finite values")
    return value


def _lora_stack(value: object) -> tuple:
    is_list = isinstance(value, (list, tuple))
    is_stack = is_list and all(isinstance(each, lora.StackEntry) for each in value)
    return tuple(require(is_stack, value, "the output of LoRA Stack (Fast)"))


def _sigmas(value: object) -> Tensor:
    tensor = _tensor(value, "SIGMAS, a tensor of noise levels", floats=False)
    fits = tensor.ndim == 1 and not tensor.is_complex() and tensor.dtype != torch.bool
    return require(fits, tensor, "SIGMAS, a tensor of one dimension")


def _has(value: object, *methods: str) -> bool:
    """Return whether a value has methods, whatever its class."""
    return all(callable(getattr(value, name, None)) for name in methods)


def _tensor(value: object, expected: str, what: str = "got", *, floats: bool = True) -> Tensor:
    """Check that a value is a tensor with values in memory, of floats if it has to be."""
    fits = isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided
    fits = fits and not value.is_meta and not value.is_quantized
    fits = fits and (not floats or (value.is_floating_point() and value.numel() > 0))
    return require(fits, value, expected, what)


TYPES: dict[str, Callable[[object], object]] = {
    "LATENT": _latent,
    "IMAGE": _image,
    "AUDIO": _audio,
    "VIDEO": _video,
    "VAE": _vae,
    "MODEL": lambda value: require(isinstance(value, ModelPatcher), value, _MODEL),
    "CLIP": _clip,
    "CONDITIONING": _conditioning,
    "SIGMAS": _sigmas,
    "FASTVAE_LORA_STACK": _lora_stack,
}
