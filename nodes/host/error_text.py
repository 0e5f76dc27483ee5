"""Values and messages in errors: short, and in one line."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

# A message that lists the keys of two files has 600 characters. A longer one quotes a whole value
# and is cut to what ComfyUI's dialog shows without a scroll bar.
_LONGEST = 900
_HEAD, _TAIL = 200, 90

# Largest integer that is written out: Python refuses more than 4300 digits.
LARGEST = 10**18

_repr = reprlib.Repr()
_repr.maxstring = 60


def require(is_right: bool, value: _T, expected: str, what: str = "got") -> _T:
    """Return `value`, or raise a `ValueError` with it and what was `expected`."""
    if is_right:
        return value
    raise ValueError(f"{what} {described(value)}; expected {expected}")


def described(value: object) -> str:
    """Describe `value` for a message such as "got a list of 3"."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return _repr.repr(value)
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    name = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"a {name} of {len(value)}"
    if isinstance(value, Mapping):
        keys = ", ".join(described(key) for key in list(value)[:4])
        return f"a {name} with {keys or 'nothing in it'}"
    return _with_article(name[:60])


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
    words = [] if tensor.numel() else ["empty"]
    words += [] if tensor.layout is torch.strided else ["sparse"]
    words += [str(tensor.dtype).removeprefix("torch."), *(["meta"] if tensor.is_meta else [])]
    return _with_article(f"{' '.join(words)} tensor {list(tensor.shape)}")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
