"""LoRA files on models of any framework: keys, files, banks, and their use in a layer.

Needs torch and safetensors. A `Bank` holds the LoRAs of a stack, `Amounts` holds their strengths,
and a `Session` applies them while a model runs; the weights of the model are never written.
"""

from .adapters import OtherKinds, Pair, WeightFunction, describe, spell
from .apply import ApplyMode, ScaledFunction
from .bank import Bank, load_bank
from .blocks import Blocks, parse_blocks
from .file import Identity, LoraFile, identity
from .key_report import KeyReport
from .keys import NETWORK, Target, Targets
from .precision import rms_of, rms_of_pair, small_deltas
from .schedule import SIGMA_TOLERANCE, Schedule, parse_number, parse_schedule, step_of
from .session import Session
from .strengths import Amounts, StackEntry, layer_name
from .substitution import is_plain

__all__ = [
    "NETWORK", "SIGMA_TOLERANCE", "Amounts", "ApplyMode", "Bank", "Blocks", "Identity", "KeyReport",
    "LoraFile", "OtherKinds", "Pair", "ScaledFunction", "Schedule", "Session", "StackEntry",
    "Target", "Targets", "WeightFunction", "describe", "identity", "is_plain", "layer_name",
    "load_bank", "parse_blocks", "parse_number", "parse_schedule", "rms_of", "rms_of_pair",
    "small_deltas", "spell", "step_of",
]  # fmt: skip
