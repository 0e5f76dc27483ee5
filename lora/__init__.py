"""LoRA files on models of any framework: keys, files, banks, and their use in a layer.

Needs torch and safetensors. A `Bank` holds the LoRAs of a stack, `Amounts` holds their strengths,
and a `Session` applies them while a model runs; the weights of the model are never written.
"""

from .adapters import Adapter, Pair
from .apply import ApplyMode, ScaledAdapter
from .bank import Bank, load_bank
from .blocks import Blocks, parse_blocks
from .file import Identity, LoraFile, identity
from .key_report import KeyReport
from .keys import Target, Targets
from .precision import LEAST_KEPT, kept, rms_of_pair, sample_of
from .schedule import SIGMA_TOLERANCE, Schedule, parse_number, parse_schedule, step_of
from .session import Session
from .strengths import Amounts, StackEntry, layer_name
from .substitution import is_plain

__all__ = [
    "LEAST_KEPT", "SIGMA_TOLERANCE", "Adapter", "Amounts", "ApplyMode", "Bank", "Blocks",
    "Identity", "KeyReport", "LoraFile", "Pair", "ScaledAdapter", "Schedule", "Session",
    "StackEntry", "Target", "Targets", "identity", "is_plain", "kept", "layer_name",
    "load_bank", "parse_blocks", "parse_number", "parse_schedule", "rms_of_pair", "sample_of",
    "step_of",
]  # fmt: skip
