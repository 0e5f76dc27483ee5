"""Values and messages in errors: short, and in one line."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# A message that lists the keys of two files has 600 characters. A longer one quotes a whole value
# and is cut to what ComfyUI's dialog shows without a scroll bar.
_LONGEST = 900
_HEAD, _TAIL = 200, 90

# Largest integer that is written out: Python refuses more than 4300 digits.
LARGEST = 10**18

_repr = reprlib.Repr()
_repr.maxstring = 60


def described(value: object) -> str:
    """Describe `value` for a message such as "got a list of 3"."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, str):
        return _repr.repr(value)
    if isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < LARGEST else f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        keys = ", ".join(described(key) for key in list(value)[:4])
        return f"a {type(value).__name__} with {keys or 'nothing in it'}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name[:60]}"


def one_line(text: str) -> str:
    """Return `text` as one line; a very long one is cut in the middle."""
    if not text.isprintable():
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _LONGEST else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put `name`, the name of an input, before the message of every `ValueError` in the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _tensor(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = "" if tensor.layout is torch.strided else "sparse "
    empty = "" if tensor.numel() else "empty "
    kind = f"{empty}{kind}{dtype}{' meta' if tensor.is_meta else ''}"
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} tensor {list(tensor.shape)}"
