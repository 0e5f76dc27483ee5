"""Which layers of a model a LoRA acts on, and how much, written in one line.

    blocks = [item {"," item}]
    item   = "!" which  |  which ["=" factor]
    which  = block  |  block "-" [block]  |  name

An empty text is every layer; the help page of the node LoRA Stack (Fast) has examples.

Numbers choose blocks, names choose layers, and a layer has to pass both: the two factors multiply.
Of the numbers, and of the names likewise: what is excluded has 0, whatever else is said of it;
otherwise the last item that fits gives its factor (1 without `=`); what fits none has 0, or 1 where
there are no items but exclusions.

A block's number is the first whole number in the dotted name of a layer, its end excepted: 12 in
`blocks.12.self_attn.q` and in `blocks.12.ffn.0`, none in `text_embedding.0` and `head.head`.
Layers without one pass the numbers, unless numbers are all that is chosen by: `0-19` is these
blocks and nothing else, `0-19,*` leaves the layers outside the blocks in.

A name fits whole segments between dots, one or several in a row: `self_attn` and `self_attn.q` fit
`blocks.12.self_attn.q`, and `attn` does not. `*`, `?` and `[...]` within a segment work as in file
names: `*attn`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .schedule import parse_number

_EXPECTED = "expected such as '7', '0-19', 'self_attn', 'img*', '!5' or '8-11=0.5'"
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*(-)\s*([0-9]{0,6}))?")
_NAME = re.compile(r"(?=.*(?:[^\W\d]|[*?]))[^\s!=]+")  # with a letter, `_` or wildcard


# Blocks from the first to the last, or layers by patterns for segments of their name in a row; and
# a factor for them, or None: they are excluded.
_Numbers = tuple[int, float, float | None]
_Names = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Blocks:
    """A filter of layers, by the number of the block and by name; made by `parse_blocks`."""

    numbers: tuple[_Numbers, ...] = ()
    names: tuple[_Names, ...] = ()

    def factor(self, module_name: str) -> float:
        """What the strength of the LoRA is multiplied by in a layer; 0: it is left alone.

        The name is dotted, as `named_modules` has it; what stands before the block does not matter:
        `blocks.12.self_attn.q`, `diffusion_model.blocks.12.self_attn.q`.
        """
        segments = module_name.split(".")
        names = [factor for _, factor in self.names]
        numbers = [factor for *_, factor in self.numbers]
        by_name = _factor([factor for item, factor in self.names if _fit(item, segments)], names)
        block = _block_number(segments)
        if block is None:
            return 0.0 if _choose(numbers) and not _choose(names) else by_name
        fitting = [factor for first, last, factor in self.numbers if first <= block <= last]
        return by_name * _factor(fitting, numbers)


def parse_blocks(text: str) -> Blocks:
    """Read a filter, as the module's docstring has it; spaces around its parts do not matter.

    Raises:
        ValueError: An item is empty, is neither numbers nor a name, runs backwards, or has a factor
            that is no finite number or belongs to an exclusion.
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
            numbers.append((*_range(match, text), factor))
        elif _NAME.fullmatch(which) and all(segments := tuple(which.split("."))):
            names.append((segments, factor))
        else:
            raise ValueError(
                f"blocks {text!r}: {item.strip()!r} is neither blocks nor a name; {_EXPECTED}"
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
    """Whether the patterns fit somewhere in a name."""
    return any(
        all(map(fnmatchcase, segments[start : start + len(patterns)], patterns))
        for start in range(len(segments) - len(patterns) + 1)
    )


def _block_number(segments: Sequence[str]) -> int | None:
    # The last segment is a layer's place in a list of layers, as in `text_embedding.0`.
    return next((int(part) for part in segments[:-1] if part.isascii() and part.isdigit()), None)


def _factor(fitting: Sequence[float | None], all_items: Sequence[float | None]) -> float:
    """What the items make of a layer that some of them fit."""
    if None in fitting:
        return 0.0
    if fitting:
        return fitting[-1] or 0.0
    return 0.0 if _choose(all_items) else 1.0


def _choose(factors: Sequence[float | None]) -> bool:
    """Whether some item takes layers in, rather than out."""
    return any(factor is not None for factor in factors)
