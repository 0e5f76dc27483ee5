"""Calls of a text encoder, collected and run together.

A call has the arguments of ComfyUI's `SDClipModel.encode`: rows of token ids of one length, and
options such as the layer. Rows do not interact, so a row of several calls (such as the empty
prompt, the reference for weights such as `(word:1.3)`) is computed once. Rows of different lengths
share a batch where padding has no effect: in encoders that mask it, T5 and the llama family.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import comfy.model_management
import torch
from comfy.sd1_clip import SDClipModel
from comfy.text_encoders.llama import BaseLlama
from comfy.text_encoders.t5 import T5

from .shadow import give_up_compiling, ready

Tokens = tuple[int, ...]
# Result of `SDClipModel.encode`: `[rows, ..., tokens, channels]`, pooled `[rows, channels]` or
# None, and for some encoders a dict with the attention mask `[rows, tokens]`.
Encoded = tuple

# Options that may be set for a call; see SDClipModel.set_clip_options.
_OPTIONS = ("layer", "layer_idx", "return_projected_pooled", "execution_device")

# A batch is padded to at most this many times its own tokens.
_MOST_PADDING = 1.5

# Most tokens of a batch, and the memory of one on a device other than the CPU: umT5-XXL's attention
# bias, masks and widest activation in float32, rounded up.
_MOST_TOKENS = 8192
_BYTES_PER_TOKEN = 512 << 10


@dataclass(frozen=True)
class EncoderCall:
    """A call of an encoder with its options, and rows of token ids of one length."""

    encoder: SDClipModel
    options: tuple[object, ...]
    rows: tuple[Tokens, ...]

    @staticmethod
    def of(encoder: SDClipModel, tokens: Sequence[Sequence[object]]) -> "EncoderCall | None":
        """Return the call of `encoder` with `tokens`; None: they include embeddings."""
        if not all(isinstance(token, int) for row in tokens for token in row):
            return None
        options = tuple(getattr(encoder, name) for name in _OPTIONS)
        return EncoderCall(encoder, options, tuple(tuple(row) for row in tokens))

    @property
    def setting(self) -> tuple[int, str]:
        """The encoder and its options."""
        return id(self.encoder), repr(self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for calls with the same result."""
        return *self.setting, self.rows


class Forwards:
    """Runs calls in a dtype and compiled as `ready` says; counts forward calls and their rows."""

    def __init__(self, dtype: torch.dtype | None, compiled: bool) -> None:
        self._dtype, self._compiled = dtype, compiled
        self.count = self.rows = 0

    def make(self, calls: Sequence[EncoderCall]) -> dict[tuple[object, ...], Encoded]:
        """Return the results of `calls` by key."""
        settings: dict[tuple[int, str], list[EncoderCall]] = {}
        for call in calls:
            settings.setdefault(call.setting, []).append(call)
        results: dict[tuple[object, ...], Encoded] = {}
        for group in settings.values():
            encoder = group[0].encoder
            for name, value in zip(_OPTIONS, group[0].options, strict=True):
                setattr(encoder, name, value)
            results |= self._make_group(encoder, group)
        return results

    def encode(self, encoder: SDClipModel, tokens: Sequence[Sequence[object]]) -> Encoded:
        """Run one forward call of `encoder`, with its options set, on `tokens`."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.count += 1
        self.rows += len(tokens)
        prepared, is_compiled = ready(encoder, self._dtype, self._compiled)
        try:
            return type(encoder).encode(prepared, tokens)
        except Exception as error:
            if not is_compiled or comfy.model_management.is_oom(error):
                raise
            give_up_compiling(error)
        prepared, _ = ready(encoder, self._dtype, compiled=False)
        return type(encoder).encode(prepared, tokens)

    def _make_group(
        self, encoder: SDClipModel, calls: list[EncoderCall]
    ) -> dict[tuple[object, ...], Encoded]:
        known: dict[Tokens, Encoded] = {}
        rows = list(dict.fromkeys(row for call in calls for row in call.rows))
        for batch in _batches(encoder, rows):
            parts = self._encode_rows(encoder, batch)
            if parts is None:
                return {call.key: self.encode(encoder, call.rows) for call in calls}
            known |= parts
        return {call.key: _joined([known[row] for row in call.rows]) for call in calls}

    def _encode_rows(
        self, encoder: SDClipModel, rows: list[Tokens]
    ) -> dict[Tokens, Encoded] | None:
        """Return the part of each row of a batch; None: the output cannot be split by rows."""
        longest = max(len(row) for row in rows)
        padded = [_padded(encoder, row, longest) for row in rows]
        try:
            output = self.encode(encoder, padded)
        except Exception as error:
            if len(rows) == 1 or not comfy.model_management.is_oom(error):
                raise
            output = None
        if output is None:  # outside the except block, which holds tensors of the failed call
            comfy.model_management.soft_empty_cache()
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            parts = [self._encode_rows(encoder, half) for half in halves]
            return None if None in parts else parts[0] | parts[1]
        masks = [mask for extra in output[2:] for mask in extra.values()]
        if any(each is not None and len(each) != len(rows) for each in (*output[:2], *masks)):
            return None
        return {row: _part(output, index, len(row)) for index, row in enumerate(rows)}


def _batches(encoder: SDClipModel, rows: list[Tokens]) -> Iterator[list[Tokens]]:
    """Yield batches of rows that can run together and fit into memory."""
    most = _most_tokens(encoder)
    batch: list[Tokens] = []
    own = 0
    for row in sorted(rows, key=len, reverse=True):
        longest = len(batch[0]) if batch else len(row)
        padded = longest * (len(batch) + 1)
        fits = padded <= max(most, longest) and padded <= _MOST_PADDING * (own + len(row))
        if batch and not (fits and (len(row) == longest or _may_pad(encoder, row, longest))):
            yield batch
            batch, own = [], 0
        batch.append(row)
        own += len(row)
    if batch:
        yield batch


def _most_tokens(encoder: SDClipModel) -> int:
    device = encoder.execution_device
    if device is None or torch.device(device).type == "cpu":
        return _MOST_TOKENS
    free = comfy.model_management.get_free_memory(torch.device(device))
    return min(_MOST_TOKENS, int(free * 0.8) // _BYTES_PER_TOKEN)


def _may_pad(encoder: SDClipModel, row: Tokens, length: int) -> bool:
    """Return whether more pads have no effect on the result of a row."""
    if not isinstance(encoder.transformer, T5 | BaseLlama) or not encoder.enable_attention_masks:
        return False
    if not isinstance(encoder.special_tokens.get("pad"), int):
        return False
    device = encoder.execution_device
    if device is None:
        device = encoder.transformer.get_input_embeddings().weight.device
    mask = encoder.process_tokens([row], device)[1]
    padded = encoder.process_tokens([_padded(encoder, row, length)], device)[1]
    # The mean of a row without unmasked tokens is over its pads, which more pads would change.
    return bool(
        mask.any() and torch.equal(padded[:, : len(row)], mask) and not padded[:, len(row) :].any()
    )


def _padded(encoder: SDClipModel, row: Tokens, length: int) -> list[int]:
    return [*row, *[encoder.special_tokens.get("pad")] * (length - len(row))]


def _part(output: Encoded, index: int, length: int) -> Encoded:
    """Return a row of an output, cut to the length of its tokens."""
    states, pooled, *extra = output
    part = (states[index][..., :length, :], None if pooled is None else pooled[index])
    return *part, *({name: mask[index][:length] for name, mask in each.items()} for each in extra)


def _joined(rows: list[Encoded]) -> Encoded:
    """Return an output of rows in new memory, because ComfyUI writes weighted tokens into it."""
    states, pooled, *extra = zip(*rows, strict=True)
    joined = (torch.stack(states), None if pooled[0] is None else torch.stack(pooled))
    return *joined, *(
        {key: torch.stack([d[key] for d in each]) for key in each[0]} for each in extra
    )


def copied(output: Encoded) -> Encoded:
    """Return a copy of `output`, tensors `[rows, tokens, channels]`, in new memory."""
    return _joined([_part(output, index, output[0].shape[-2]) for index in range(len(output[0]))])
