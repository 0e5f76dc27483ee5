"""Parse which layers of a model a LoRA changes, and how much, from one line of text.

    blocks = [item {"," item}]
    item   = "!" which  |  which ["=" factor]
    which  = block  |  block "-" [block]  |  name

An empty text selects every layer; the help page of LoRA Stack (Fast) has examples.

Numbers select blocks and names select layers. A layer must pass both, and the two factors multiply.
Within the numbers, and within the names: an exclusion sets 0; otherwise the last matching item sets
its factor (1 without `=`); without a match the factor is 0, or 1 if all items are exclusions.

A block's number is the first whole number in the dotted name of a layer, except at its end: 12 in
`blocks.12.self_attn.q` and in `blocks.12.ffn.0`, none in `text_embedding.0` and `head.head`. Layers
without a number pass the numbers, unless only numbers are given: `0-19` selects these blocks and
nothing else, `0-19,*` also the layers outside the blocks.

A name matches one or several whole segments between dots: `self_attn` and `self_attn.q` match
`blocks.12.self_attn.q`, `attn` does not. `*`, `?` and `[...]` within a segment work as in file
names: `*attn`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .schedule import parse_number

_EXPECTED = "expected for example '7', '0-19', 'self_attn', 'img*', '!5' or '8-11=0.5'"
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*(-)\s*([0-9]{0,6}))?")
_NAME = re.compile(r"(?=.*(?:[^\W\d]|[*?]))[^\s!=]+")  # with a letter, `_` or wildcard


# Blocks from the first to the last, and patterns for consecutive segments of a layer's name, each
# with a factor, or None for an exclusion.
_Numbers = tuple[tuple[int, float], float | None]
_Names = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Blocks:
    """A filter of layers by block number and by name, from `parse_blocks`."""

    numbers: tuple[_Numbers, ...] = ()
    names: tuple[_Names, ...] = ()

    def factor(self, module_name: str) -> float:
        """Return the factor of the LoRA's strength in a layer; 0: it is not changed.

        The name is dotted, as in `named_modules`, with or without a prefix:
        `blocks.12.self_attn.q`, `diffusion_model.blocks.12.self_attn.q`.
        """
        segments = module_name.split(".")
        numbers, names = ([factor for _, factor in each] for each in (self.numbers, self.names))
        by_name = _factor([factor for item, factor in self.names if _fit(item, segments)], names)
        # The last segment is the place of a layer in a list of layers, as in `text_embedding.0`.
        blocks = [int(part) for part in segments[:-1] if part.isascii() and part.isdigit()]
        if not blocks:
            return 0.0 if _choose(numbers) and not _choose(names) else by_name
        fitting = [factor for (first, last), factor in self.numbers if first <= blocks[0] <= last]
        return by_name * _factor(fitting, numbers)


def parse_blocks(text: str) -> Blocks:
    """Parse a filter; the syntax is in the module's docstring, spaces around parts are ignored.

    A ValueError: an item is empty, is neither numbers nor a name, runs backwards, or has a factor
    that is not finite or belongs to an exclusion.
    """
    numbers: list[_Numbers] = []
    names: list[_Names] = []
    for item in text.split(",") if text.strip() else ():
        which, equals, factor_text = item.strip().partition("=")
        excluded = which.startswith("!")
        factor = parse_number(factor_text) if equals else 1.0
        if factor is None or (excluded and equals):
            raise ValueError(
                f"blocks {text!r}: {item.strip()!r} has no valid factor; "
                "expected a finite number, and none after '!', such as '8-11=0.5'"
            )
        which, factor = which.removeprefix("!").strip(), None if excluded else factor
        if match := _RANGE.fullmatch(which):
            numbers.append((_range(match, text), factor))
        elif _NAME.fullmatch(which) and all(segments := tuple(which.split("."))):
            names.append((segments, factor))
        else:
            raise ValueError(
                f"blocks {text!r}: {item.strip()!r} is neither a block nor a name; {_EXPECTED}"
            )
    return Blocks(tuple(numbers), tuple(names))


def _range(match: re.Match[str], text: str) -> tuple[int, float]:
    first, dash, end = match.groups()
    last = int(end) if end else math.inf if dash else int(first)
    if last < int(first):
        raise ValueError(
            f"blocks {text!r}: {match.group()!r} runs backwards; expected '{last}-{int(first)}'"
        )
    return int(first), last


def _fit(patterns: Sequence[str], segments: Sequence[str]) -> bool:
    """Return whether the patterns match anywhere in a name."""
    return any(
        all(map(fnmatchcase, segments[start : start + len(patterns)], patterns))
        for start in range(len(segments) - len(patterns) + 1)
    )


def _factor(fitting: Sequence[float | None], all_items: Sequence[float | None]) -> float:
    """Return the factor of a layer that matches some items."""
    if None in fitting:
        return 0.0
    if fitting:
        return fitting[-1] or 0.0
    return 0.0 if _choose(all_items) else 1.0


def _choose(factors: Sequence[float | None]) -> bool:
    """Return whether an item includes layers rather than excluding them."""
    return any(factor is not None for factor in factors)
