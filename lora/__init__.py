"""LoRA files on models of any framework: keys, files, banks, and their use in a layer.

Needs torch and safetensors. A `Bank` holds the LoRAs of a stack, `Amounts` holds their strengths,
and a `Session` applies them while a model runs; the weights of the model are never written.
"""

from .bank import Amounts, Bank, StackEntry, layer_name, load_bank
from .blocks import Blocks, parse_blocks
from .deltas import ApplyMode, OtherKinds, Pair, ScaledFunction, WeightFunction, describe, spell
from .file import Identity, KeyReport, LoraFile, identity
from .keys import NETWORK, Target, Targets
from .precision import is_plain, rms_of, rms_of_pair, small_deltas
from .schedule import SIGMA_TOLERANCE, Schedule, parse_number, parse_schedule, step_of
from .session import Session

__all__ = [
    "NETWORK", "SIGMA_TOLERANCE", "Amounts", "ApplyMode", "Bank", "Blocks", "Identity", "KeyReport",
    "LoraFile", "OtherKinds", "Pair", "ScaledFunction", "Schedule", "Session", "StackEntry",
    "Target", "Targets", "WeightFunction", "describe", "identity", "is_plain", "layer_name",
    "load_bank", "parse_blocks", "parse_number", "parse_schedule", "rms_of", "rms_of_pair",
    "small_deltas", "spell", "step_of",
]  # fmt: skip
