"""How long the steps of a stream are: from the frame's size and the memory that there is."""

import os
from dataclasses import dataclass

import torch

from .config import VAEConfig


@dataclass(frozen=True)
class Plan:
    """The steps of one stream.

    Attributes:
        chunk: Latents per step.
        part_bytes: Size of an activation above which its frames go on in parts.
    """

    chunk: int
    part_bytes: int


def make_plan(config, batch, height, width, dtype, device, limit_bytes) -> Plan:
    return Plan(int(os.environ.get("CH", 1)), int(float(os.environ.get("PB", "24")) * 2**20))
