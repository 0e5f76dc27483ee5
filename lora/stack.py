"""LoRAs that belong together, as users chain them."""

from dataclasses import dataclass

from .blocks import Blocks
from .schedule import Schedule


@dataclass(frozen=True)
class Entry:
    """A LoRA of a stack.

    Attributes:
        path: Of its file.
        schedule: Its strengths.
        blocks: Where it is applied.
    """

    path: str
    schedule: Schedule
    blocks: Blocks


Stack = tuple[Entry, ...]
