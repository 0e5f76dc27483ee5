"""Rows of token ids of several prompts, run through ComfyUI's text encoders together.

ComfyUI calls `SDClipModel.encode` with the rows of a prompt, all of one length. An encoder's first
call shows which part of a prompt's tokens it gets, and thus the rows that it gets for the other
prompts. Rows do not interact, so all run in one batch, equal ones (such as the empty prompt, the
reference for weights such as `(word:1.3)`) once. Rows of different lengths share a batch where
padding has no effect: in encoders that mask it, T5 and the llama family.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import comfy.model_management
import torch
from comfy.sd1_clip import SDClipModel, gen_empty_tokens
from comfy.text_encoders.llama import BaseLlama
from comfy.text_encoders.t5 import T5
from torch import nn

from ...kernels import first_line

_logger = logging.getLogger(__name__)

Row = tuple[int, ...]
# Result of `SDClipModel.encode`: `[rows, ..., tokens, channels]`, pooled `[rows, channels]` or
# None, and for some encoders a dict with the attention mask `[rows, tokens]`.
Encoded = tuple
Found = tuple[Encoded, int]  # a row of a result

# The options of a call; see SDClipModel.set_clip_options.
_OPTIONS = ("layer", "layer_idx", "return_projected_pooled", "execution_device")

# A batch is padded to at most this many times its own tokens.
_MOST_PADDING = 1.5

# Most tokens of a batch, and the memory of one on a device other than the CPU: umT5-XXL's attention
# bias, masks and widest activation in float32, rounded up.
_MOST_TOKENS = 8192
_BYTES_PER_TOKEN = 512 << 10

_compiling = {"works": True}


class Batching:
    """Answers encoders' calls for prompts with known `tokens`; counts forward calls and rows."""

    def __init__(self, tokens: Sequence[object], dtype: torch.dtype | None, compiled: bool) -> None:
        self._tokens, self._dtype, self._compiled = tokens, dtype, compiled
        self._known: dict[tuple[SDClipModel, str], dict[Row, Found]] = {}
        self.calls = self.rows = 0

    def answer(self, encoder: SDClipModel, tokens: Sequence[Sequence[object]]) -> Encoded:
        """Return the result of `encoder.encode(tokens)`."""
        if not all(isinstance(token, int) for row in tokens for token in row):  # embeddings
            return self._forward(encoder, tokens)
        options = repr([getattr(encoder, name) for name in _OPTIONS])
        known = self._known.setdefault((encoder, options), {})
        rows = [tuple(row) for row in tokens]
        if not all(row in known for row in rows):
            parts = [part for prompt in self._tokens for part in _asked(encoder, prompt)]
            names = {name for name, asked in parts if asked == rows}
            later = [row for name, asked in parts if name in names for row in asked]
            wanted = dict.fromkeys([*rows, *later])
            for batch in _batches(encoder, [row for row in wanted if row not in known]):
                known |= self._run(encoder, batch)
        return _joined([known[row] for row in rows], len(rows[0]))

    def _run(self, encoder: SDClipModel, batch: list[Row]) -> dict[Row, Found]:
        """Return the results of a batch; one that is out of memory runs in halves."""
        try:
            output = self._forward(encoder, _padded(encoder, batch, len(batch[0])))
            return {row: (output, index) for index, row in enumerate(batch)}
        except Exception as error:
            if len(batch) == 1 or not comfy.model_management.is_oom(error):
                raise
        # Outside the except block, which holds tensors of the failed call.
        comfy.model_management.soft_empty_cache()
        half = len(batch) // 2
        return self._run(encoder, batch[:half]) | self._run(encoder, batch[half:])

    def _forward(self, encoder: SDClipModel, tokens: Sequence[Sequence[object]]) -> Encoded:
        """Run an encoder. ComfyUI's modules are altered during the call alone, also if it fails."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        blocks = _blocks(encoder.transformer) if self._compiled and _compiling["works"] else []
        try:
            with ExitStack() as undo:
                convert = functools.partial(_converted, self._dtype)
                hook = encoder.transformer.register_forward_pre_hook(convert, with_kwargs=True)
                undo.callback(hook.remove)
                for block in blocks:  # all of a class share its compiled forward
                    undo.callback(vars(block).pop, "forward", None)
                    block.forward = functools.partial(torch.compile(type(block).forward), block)
                output = SDClipModel.encode(encoder, tokens)
            self.calls, self.rows = self.calls + 1, self.rows + len(tokens)
            return output
        except Exception as error:
            if not blocks or comfy.model_management.is_oom(error):
                raise
            _compiling["works"] = False
            _logger.warning(
                "Fast Video VAE: torch.compile fails, the text encoder runs without it: %s: %s",
                type(error).__name__,
                first_line(error),
            )
        return self._forward(encoder, tokens)


def _converted(
    dtype: torch.dtype | None, _: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    given = {} if dtype is None else {"dtype": dtype, "embeds": kwargs["embeds"].to(dtype)}
    return args, kwargs | given


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return equal modules in a list, outermost first, except those whose forward is replaced."""
    if isinstance(module, nn.ModuleList) and len(module) > 1 and len(set(map(type, module))) == 1:
        return [block for block in module if "forward" not in vars(block)]
    return [block for part in module.children() for block in _blocks(part)]


def _asked(encoder: SDClipModel, tokens: object) -> Iterator[tuple[str, list[Row]]]:
    """Yield the parts of a prompt by name, each as the rows with which ComfyUI calls `encoder`."""
    empty = getattr(encoder, "gen_empty_tokens", gen_empty_tokens)
    for name, part in tokens.items() if isinstance(tokens, dict) else ():
        if isinstance(part, list) and part and all(isinstance(row, list) for row in part):
            pairs = [pair for row in part for pair in row]
            # Pairs of id and weight. An embedding has a tensor for the id.
            if all(isinstance(p, tuple) and len(p) > 1 and isinstance(p[0], int) for p in pairs):
                rows = [tuple(pair[0] for pair in row) for row in part]
                if any(pair[1] != 1.0 for pair in pairs):
                    rows.append(tuple(empty(encoder.special_tokens, max(map(len, rows)))))
                yield name, rows


def _batches(encoder: SDClipModel, rows: list[Row]) -> list[list[Row]]:
    """Return batches of rows, the longest first, that can run together and fit into memory."""
    most, device = _MOST_TOKENS, torch.device(encoder.execution_device or "cpu")
    if device.type != "cpu":
        free = comfy.model_management.get_free_memory(device)
        most = min(most, int(free * 0.8) // _BYTES_PER_TOKEN)
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        batch = [*batches[-1], row] if batches else [row]
        padded = len(batch[0]) * len(batch)
        fits = batches and padded <= min(most, _MOST_PADDING * sum(map(len, batch)))
        if fits and (len(row) == len(batch[0]) or _may_pad(encoder, row, len(batch[0]))):
            batches[-1] = batch
        else:
            batches.append([row])
    return batches


def _may_pad(encoder: SDClipModel, row: Row, length: int) -> bool:
    """Return whether more pads have no effect on the result of a row."""
    is_known = isinstance(encoder.transformer, T5 | BaseLlama) and encoder.enable_attention_masks
    if not is_known or not isinstance(encoder.special_tokens.get("pad"), int):
        return False
    mask = encoder.process_tokens(_padded(encoder, [row], length), encoder.execution_device)[1][0]
    # The mean of a row without unmasked tokens is over its pads, which more pads would change.
    return bool(mask[: len(row)].any() and not mask[len(row) :].any())


def _padded(encoder: SDClipModel, rows: list[Row], length: int) -> list[list[int]]:
    return [[*row, *[encoder.special_tokens.get("pad")] * (length - len(row))] for row in rows]


def _joined(found: list[Found], length: int) -> Encoded:
    """Return rows of results in new memory, because ComfyUI writes weighted tokens into it."""
    (_, pooled, *extra), _ = found[0]
    states = torch.stack([output[0][index][..., :length, :] for output, index in found])
    if pooled is not None:
        pooled = torch.stack([output[1][index] for output, index in found])
    masks = [
        {name: torch.stack([o[2][name][i][:length] for o, i in found]) for name in each}
        for each in extra
    ]
    return states, pooled, *masks
