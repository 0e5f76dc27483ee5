"""The kinds of adapters in LoRA files: what each adds to one weight, and how it is read."""

from .base import Adapter, spell
from .low_rank import Pair
from .parser import PARTS, make_adapter

__all__ = ["PARTS", "Adapter", "Pair", "make_adapter", "spell"]
