"""Which layers of a model a LoRA acts on, and how much, written in one line.

    blocks = [item {"," item}]
    item   = "!" which  |  which ["=" factor]
    which  = block  |  block "-" [block]  |  name

| text | layers |
| --- | --- |
| (empty) | all |
| `0-19` | blocks 0 to 19 |
| `20-` | block 20 and those after it |
| `!5,!7` | all but blocks 5 and 7 |
| `self_attn` | self attention, in every block |
| `0-19,self_attn,ffn` | self attention and feed forward of blocks 0 to 19 |
| `!cross_attn` | all but cross attention |
| `0-,8-11=0.5` | every block, 8 to 11 at half strength |
| `*,cross_attn=0.5` | all, cross attention at half strength |
| `*_img,img*` | names that end in `_img` or begin with `img` |

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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .schedule import parse_number

_EXPECTED = "expected such as '7', '0-19', 'self_attn', 'img*', '!5' or '8-11=0.5'"
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*(-)\s*([0-9]{0,6}))?")
_NAME = re.compile(r"(?=.*(?:[^\W\d]|[*?]))[^\s!=]+")  # with a letter, `_` or wildcard


@dataclass(frozen=True)
class NumberItem:
    """Blocks by their numbers.

    Attributes:
        first: The first of them.
        last: The last of them; None: there is none.
        factor: For them; None: they are excluded.
    """

    first: int
    last: int | None
    factor: float | None

    def fits(self, block: int) -> bool:
        """Whether the block is one of them."""
        return self.first <= block and (self.last is None or block <= self.last)


@dataclass(frozen=True)
class NameItem:
    """Layers by their names.

    Attributes:
        segments: Patterns for this many segments of a name in a row.
        factor: For them; None: they are excluded.
    """

    segments: tuple[str, ...]
    factor: float | None

    def fits(self, segments: Sequence[str]) -> bool:
        """Whether the patterns fit somewhere in a name."""
        count = len(self.segments)
        return any(
            all(map(fnmatchcase, segments[start : start + count], self.segments))
            for start in range(len(segments) - count + 1)
        )


_Item = NumberItem | NameItem


@dataclass(frozen=True)
class Blocks:
    """A filter of layers; made by `parse_blocks`.

    Attributes:
        numbers: Items that choose by the number of the block.
        names: Items that choose by name.
    """

    numbers: tuple[NumberItem, ...] = ()
    names: tuple[NameItem, ...] = ()

    def factor(self, module_name: str) -> float:
        """What the strength of the LoRA is multiplied by in a layer.

        Args:
            module_name: Dotted, as `named_modules` has it; what stands before the block does not
                matter: `blocks.12.self_attn.q`, `diffusion_model.blocks.12.self_attn.q`.

        Returns:
            0 for a layer that the LoRA leaves alone, 1 for one without a factor of its own.
        """
        segments = module_name.split(".")
        by_name = _factor([item for item in self.names if item.fits(segments)], self.names)
        block = _block_number(segments)
        if block is None:
            return 0.0 if _choose(self.numbers) and not _choose(self.names) else by_name
        return by_name * _factor([item for item in self.numbers if item.fits(block)], self.numbers)


def parse_blocks(text: str) -> Blocks:
    """Read a filter.

    Args:
        text: As the module's docstring has it; spaces around its parts do not matter.

    Raises:
        ValueError: An item is empty, is neither numbers nor a name, runs backwards, or has a factor
            that is no finite number or belongs to an exclusion.
    """
    numbers, names = [], []
    for item in text.split(",") if text.strip() else ():
        which, equals, factor_text = item.strip().partition("=")
        excluded = which.startswith("!")
        factor = parse_number(factor_text) if equals else 1.0
        if factor is None or (excluded and equals):
            raise ValueError(
                f"blocks {text!r}: {item.strip()!r} has no valid factor; "
                "expected a finite number, and none after '!', such as '8-11=0.5'"
            )
        which = which.removeprefix("!").strip()
        if match := _RANGE.fullmatch(which):
            numbers.append(_number_item(match, None if excluded else factor, text))
        elif _NAME.fullmatch(which) and all(segments := tuple(which.split("."))):
            names.append(NameItem(segments, None if excluded else factor))
        else:
            raise ValueError(
                f"blocks {text!r}: {item.strip()!r} is neither blocks nor a name; {_EXPECTED}"
            )
    return Blocks(tuple(numbers), tuple(names))


def _number_item(match: re.Match[str], factor: float | None, text: str) -> NumberItem:
    """The item for a match of `_RANGE` in `text`."""
    first, dash, last = match.groups()
    item = NumberItem(int(first), int(last) if last else None if dash else int(first), factor)
    if item.last is not None and item.last < item.first:
        raise ValueError(
            f"blocks {text!r}: {match.group()!r} runs backwards; "
            f"expected '{item.last}-{item.first}'"
        )
    return item


def _block_number(segments: Sequence[str]) -> int | None:
    """The first whole number among the segments of a name, the last one excepted.

    That one is a layer's place in a list of layers, as in `text_embedding.0`.
    """
    return next((int(part) for part in segments[:-1] if part.isascii() and part.isdigit()), None)


def _factor(fitting: Sequence[_Item], items: Sequence[_Item]) -> float:
    """What the items make of a layer that some of them fit."""
    if any(item.factor is None for item in fitting):
        return 0.0
    if fitting:
        return fitting[-1].factor or 0.0
    return 0.0 if _choose(items) else 1.0


def _choose(items: Sequence[_Item]) -> bool:
    """Whether some item takes layers in, rather than out."""
    return any(item.factor is not None for item in items)
