"""LoRA files on models of any framework: keys, files, banks, and their ways into a layer.

Needs torch and safetensors. A `Bank` holds the LoRAs of a stack, `Amounts` say how much of each
there is, and a `Session` applies them while a model is called; its weights are never written.
"""

from .adapter_parser import Adapter
from .apply import Mode, break_even
from .bank import Bank, load_bank
from .blocks import Blocks, parse_blocks
from .file import Identity, LoraFile, Report, identity
from .hooks import Formula, applied
from .keys import Target, Targets
from .schedule import SIGMA_TOLERANCE, Schedule, parse_number, parse_schedule, step_of
from .session import Call, Session
from .stack import Entry, Stack
from .strengths import Amounts, Share, layer_name
from .timer import Timer

__all__ = [
    "SIGMA_TOLERANCE",
    "Adapter",
    "Amounts",
    "Bank",
    "Blocks",
    "Call",
    "Entry",
    "Formula",
    "Identity",
    "LoraFile",
    "Mode",
    "Report",
    "Schedule",
    "Session",
    "Share",
    "Stack",
    "Target",
    "Targets",
    "Timer",
    "applied",
    "break_even",
    "identity",
    "layer_name",
    "load_bank",
    "parse_blocks",
    "parse_number",
    "parse_schedule",
    "step_of",
]
