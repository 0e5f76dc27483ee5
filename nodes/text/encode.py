"""Several prompts through ComfyUI's CLIP in one pass of its text encoders, and their cache.

ComfyUI encodes each prompt with `CLIP.encode_from_tokens_scheduled`; only the calls of an encoder's
network are answered here, from batches with the rows of all prompts.
"""

import functools
import logging
import time
import weakref
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import comfy.model_management
import torch
from comfy.sd import CLIP
from comfy.sd1_clip import SDClipModel
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..host import timing
from .batch import Batching

_logger = logging.getLogger(__name__)

# ComfyUI's CONDITIONING: pairs of `[1, tokens, channels]` and a dict of other values.
Conditioning = list[list[Any]]

MOST_BYTES = 256 << 20

# Methods of an encoder that must be ComfyUI's own for its calls to be answered here. For example,
# MiniMax's `encode_token_weights` adds what the last forward call left in the network.
_METHODS = ("encode_token_weights", "encode", "forward", "process_tokens")


def encode(
    clip: CLIP,
    prompts: Sequence[str],
    dtype: torch.dtype | None = None,
    *,
    compiled: bool = False,
    cache_size: int = 0,
) -> tuple[list[Conditioning], str]:
    """Return the conditionings of CLIPTextEncode, made in one pass, and a report in one line."""
    first = time.perf_counter()
    different = list(dict.fromkeys(prompts))
    identity = _identity(clip, dtype, compiled) if cache_size > 0 else None
    # The file of an embedding may change.
    keys = {p: (*identity, p) for p in different if identity and "embedding:" not in p}
    done = {p: found for p, key in keys.items() if (found := cache.get(key)) is not None}
    cached, work = len(done), "0 forward calls, 0 rows"
    missing = [prompt for prompt in different if prompt not in done]
    if missing:
        device = getattr(getattr(clip, "patcher", None), "load_device", None)
        with timing.span("conditioning", device=device):
            encoded, work = _encode(clip, missing, dtype, compiled)
        done |= encoded
    for prompt in filter(keys.get, missing):
        cache.put(keys[prompt], done[prompt], cache_size)
    repeated = f", {len(different)} different" if len(different) < len(prompts) else ""
    seconds = time.perf_counter() - first
    report = f"{_count(len(prompts), 'prompt')}{repeated}: {cached} from the cache, {work}"
    return [copied(done[prompt]) for prompt in prompts], f"{report}, {seconds:.3f} s"


def _encode(
    clip: CLIP, prompts: list[str], dtype: torch.dtype | None, compiled: bool
) -> tuple[dict[str, Conditioning], str]:
    """Return the conditionings by prompt, and a description of the work."""
    model = getattr(clip, "cond_stage_model", clip)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    encoders = [module for module in modules if _is_plain(module)]
    reason = None if encoders else f"{type(model).__name__} has no encoder with known batching"
    if getattr(getattr(clip, "patcher", None), "forced_hooks", None) is not None:
        encoders, reason = [], "its hooks change the weights"
    if reason is not None:
        unused = " without dtype and compile" if dtype is not None or compiled else ""
        _logger.info(
            "Fast Video VAE: prompts are encoded one after the other%s: %s", unused, reason
        )
    batching = Batching([clip.tokenize(each) for each in prompts if encoders], dtype, compiled)
    done: dict[str, Conditioning] = {}
    with ExitStack() as undo:
        for encoder in encoders:
            undo.callback(vars(encoder).pop, "encode", None)
            encoder.encode = functools.partial(batching.answer, encoder)
        # The longest first: ComfyUI reserves memory for one prompt, and the first runs all.
        for prompt in sorted(prompts, key=len, reverse=True):
            comfy.model_management.throw_exception_if_processing_interrupted()
            done[prompt] = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
    if reason is not None:
        return done, "encoded one after the other"
    return done, f"{_count(batching.calls, 'forward call')}, {_count(batching.rows, 'row')}"


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is an encoder with the methods of ComfyUI's base class."""
    return isinstance(module, SDClipModel) and all(
        name not in vars(module) and getattr(type(module), name) is getattr(SDClipModel, name)
        for name in _METHODS
    )


def _identity(clip: CLIP, dtype: torch.dtype | None, compiled: bool) -> tuple[Any, ...] | None:
    """Return everything that a conditioning depends on; None: something is unknown."""
    if not isinstance(clip, CLIP) or clip.apply_hooks_to_conds or clip.patcher.forced_hooks:
        return None
    patcher = clip.patcher
    # CLIP always sets the first one itself. All others are not part of `patches_uuid`.
    others = [name for name in patcher.object_patches if name != "manual_cast_dtype"]
    if others or patcher.injections or patcher.additional_models or patcher.hook_patches:
        return None
    model, tokenizer = weakref.ref(clip.cond_stage_model), weakref.ref(clip.tokenizer)
    options = (clip.layer_idx, sorted(clip.tokenizer_options.items()), str(dtype), compiled)
    return model, tokenizer, patcher.patches_uuid, repr(options)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# Nodes may write into the tensors of a conditioning, so it shares none with its callers.
class TextCache:
    """Conditionings by text encoder and prompt; the least recently used are dropped."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        # The oldest use first.
        self._entries: dict[tuple[Hashable, ...], Conditioning] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Hashable, ...]) -> Conditioning | None:
        """Return a copy of the conditioning of `key`; None: it is not in the cache."""
        for each in list(self._entries):
            if any(isinstance(part, weakref.ref) and part() is None for part in each):
                self._drop(each)
        if key not in self._entries:
            return None
        self._entries[key] = self._entries.pop(key)
        return copied(self._entries[key])

    def put(self, key: tuple[Hashable, ...], conditioning: Conditioning, most: int) -> None:
        """Store a copy of a conditioning, and drop the oldest entries above `most`."""
        self._drop(key)
        self._entries[key] = copied(conditioning)
        self.nbytes += nbytes(conditioning)
        while self._entries and (len(self) > most or self.nbytes > self._most_bytes):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        self.nbytes -= nbytes(self._entries.pop(key, None))


def copied(value: Any) -> Any:  # noqa: ANN401
    """Return a conditioning, or a part of it, in new containers and tensors; hooks are shared."""
    return pytree.tree_map_only(Tensor, Tensor.clone, value)


def nbytes(value: object) -> int:
    """Return the bytes of all tensors of a conditioning, or of a part of it."""
    return sum(each.nbytes for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


cache = TextCache()
