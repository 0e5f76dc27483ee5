"""Several prompts through ComfyUI's CLIP in one pass of its text encoder.

ComfyUI processes each prompt with `CLIP.encode_from_tokens_scheduled`; only the calls of the
encoder's network are answered here. At the first call with an unknown result, the encoding of a
prompt is aborted; all such calls of all prompts are run together, and the prompts are encoded again
up to the next unknown call, for example in CLIP-L and then CLIP-G. This uses shadows of the CLIP
and its modules (`shadow.py`); ComfyUI's own are not modified.
"""

import copy
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.sd import CLIP
from comfy.sd1_clip import SDClipModel
from torch import nn

from ..host import timing
from .batch import Encoded, EncoderCall, Forwards
from .batch import copied as copied_output
from .cache import Conditioning, TextCache, copied
from .shadow import shadow, with_parts

_logger = logging.getLogger(__name__)

cache = TextCache()

# Methods that must be ComfyUI's own for calls to be answered here: of an encoder, and of all
# modules.
_OF_ENCODER = ("forward", "encode", "process_tokens")
_OF_ALL = ("encode_token_weights", "set_clip_options", "reset_clip_options")


@dataclass(frozen=True)
class EncodeReport:
    """The work of an encoding; calls are None where they are unknown."""

    prompts: int
    different: int
    cached: int
    calls: int | None
    rows: int
    seconds: float

    def __str__(self) -> str:
        prompts = _count(self.prompts, "prompt")
        if self.different < self.prompts:
            prompts += f", {self.different} different"
        if self.calls is None:
            work = "encoded one after the other"
        else:
            work = f"{_count(self.calls, 'forward call')}, {_count(self.rows, 'row')}"
        return f"{prompts}: {self.cached} from the cache, {work}, {self.seconds:.3f} s"


def encode(
    clip: CLIP,
    prompts: Sequence[str],
    dtype: torch.dtype | None = None,
    *,
    compiled: bool = False,
    cache_size: int = 0,
) -> tuple[list[Conditioning], EncodeReport]:
    """Encode prompts as CLIPTextEncode does, in one pass; a `cache_size` of 0: no cache."""
    first = time.perf_counter()
    different = list(dict.fromkeys(prompts))
    identity = _identity(clip, dtype, compiled) if cache_size > 0 else None
    done: dict[str, Conditioning] = {}
    for prompt in different if identity is not None else ():
        found = cache.get((*identity, prompt))
        if found is not None:
            done[prompt] = found
    cached, calls, rows = len(done), 0, 0
    missing = [prompt for prompt in different if prompt not in done]
    if missing:
        device = getattr(getattr(clip, "patcher", None), "load_device", None)
        with timing.span("conditioning", device=device):
            encoded, calls, rows = _encode(clip, missing, dtype, compiled)
        done |= zip(missing, encoded, strict=True)
    for prompt in missing if identity is not None else ():
        if "embedding:" not in prompt:  # the file may change
            cache.put((*identity, prompt), done[prompt], cache_size)
    seconds = time.perf_counter() - first
    report = EncodeReport(len(prompts), len(different), cached, calls, rows, seconds)
    return [copied(done[prompt]) for prompt in prompts], report


def _encode(
    clip: CLIP, prompts: list[str], dtype: torch.dtype | None, compiled: bool
) -> tuple[list[Conditioning], int | None, int]:
    """Return the conditionings, forward calls and rows."""
    reason = _why_not(clip)
    if reason is not None:
        unused = " without dtype and compile" if dtype is not None or compiled else ""
        _logger.info(
            "Fast Video VAE: prompts are encoded one after the other%s: %s", unused, reason
        )
        return [_alone(clip, prompt) for prompt in prompts], None, 0
    forwards = Forwards(dtype, compiled)
    with comfy.model_management.cuda_device_context(clip.patcher.load_device):
        encoded = _Replay(clip, forwards).run(prompts)
    return encoded, forwards.count, forwards.rows


def _alone(clip: CLIP, prompt: str) -> Conditioning:
    comfy.model_management.throw_exception_if_processing_interrupted()
    return clip.encode_from_tokens_scheduled(clip.tokenize(prompt))


class _UnknownCall(BaseException):
    """Aborts the encoding of a prompt; a `BaseException`, to pass every `except Exception`."""


class _Replay:
    """Encodes prompts repeatedly, each time up to the next unknown call."""

    def __init__(self, clip: CLIP, forwards: Forwards) -> None:
        self._clip, self._forwards = clip, forwards
        self._known: dict[tuple[object, ...], Encoded] = {}
        self._unknown: dict[tuple[object, ...], EncoderCall] = {}
        self._encoders: list[SDClipModel] = []

    def run(self, prompts: list[str]) -> list[Conditioning]:
        """Return the conditionings of prompts."""
        self._load(prompts)
        stand_in, patcher = copy.copy(self._clip), self._clip.patcher
        stand_in.load_model = lambda *_, **__: patcher  # it is loaded already
        stand_in.cond_stage_model = shadow(self._clip.cond_stage_model, self._answering)
        try:
            return self._encode(stand_in, prompts)
        finally:
            for encoder in self._encoders:  # they refer to themselves and to the weights
                del encoder.encode

    def _encode(self, stand_in: CLIP, prompts: list[str]) -> list[Conditioning]:
        done: dict[str, Conditioning] = {}
        while len(done) < len(prompts):
            for prompt in prompts:
                if prompt not in done:
                    try:
                        # Tokenize again: some encoders change the tokens.
                        tokens = stand_in.tokenize(prompt)
                        done[prompt] = stand_in.encode_from_tokens_scheduled(tokens)
                    except _UnknownCall:
                        continue
            self._known |= self._forwards.make(list(self._unknown.values()))
            self._unknown.clear()
        return [done[prompt] for prompt in prompts]

    def _load(self, prompts: list[str]) -> None:
        tokens = [self._clip.tokenize(prompt) for prompt in prompts]
        estimate = getattr(self._clip.cond_stage_model, "memory_estimation_function", None)
        if estimate is not None:
            device = self._clip.patcher.load_device
            tokens.sort(key=lambda each: estimate(each, device=device))
        self._clip.load_model(tokens[-1])

    def _answering(self, module: nn.Module) -> nn.Module | None:
        """Return an encoder with calls that are answered here, or None for other modules."""
        if not _is_plain(module):
            return None
        encoder = with_parts(module, module._modules)
        self._encoders.append(encoder)
        encoder.encode = lambda tokens: self._answer(encoder, tokens)
        return encoder

    def _answer(self, encoder: SDClipModel, tokens: Sequence[Sequence[object]]) -> Encoded:
        call = EncoderCall.of(encoder, tokens)
        if call is None:
            return self._forwards.encode(encoder, tokens)
        if call.key not in self._known:
            self._unknown[call.key] = call
            raise _UnknownCall
        return copied_output(self._known[call.key])


def _why_not(clip: CLIP) -> str | None:
    """Return why a CLIP cannot encode prompts together; None: it can."""
    model, patcher = getattr(clip, "cond_stage_model", None), getattr(clip, "patcher", None)
    if not isinstance(model, nn.Module) or patcher is None:
        return f"{type(clip).__name__} is not a CLIP of ComfyUI"
    if getattr(patcher, "forced_hooks", None) is not None:
        return "its hooks change the weights"
    encoders = [module for module in model.modules() if isinstance(module, SDClipModel)]
    if not any(_is_plain(encoder) for encoder in encoders):
        return f"{type(model).__name__} has no encoder with known batching"
    for module in model.modules():
        if any(name in vars(module) for name in _OF_ALL):
            return f"{type(module).__name__} has methods of another pack"
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is an encoder with the methods of ComfyUI's base class."""
    if not isinstance(module, SDClipModel) or any(name in vars(module) for name in _OF_ENCODER):
        return False
    return all(getattr(type(module), name) is getattr(SDClipModel, name) for name in _OF_ENCODER)


def _identity(clip: CLIP, dtype: torch.dtype | None, compiled: bool) -> tuple[Any, ...] | None:
    """Return everything that a conditioning depends on; None: something is unknown."""
    if not isinstance(clip, CLIP) or clip.apply_hooks_to_conds or clip.patcher.forced_hooks:
        return None
    patcher = clip.patcher
    # CLIP always sets the first one itself. All others are not part of `patches_uuid`.
    others = [name for name in patcher.object_patches if name != "manual_cast_dtype"]
    if others or patcher.injections or patcher.additional_models or patcher.hook_patches:
        return None
    options = sorted(clip.tokenizer_options.items())
    return (
        weakref.ref(clip.cond_stage_model),
        weakref.ref(clip.tokenizer),
        patcher.patches_uuid,
        repr((clip.layer_idx, options, str(dtype), compiled)),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
