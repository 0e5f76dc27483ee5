"""Widgets that several nodes have, and what they mean."""

import logging

import torch
from comfy_api.latest import io

_logger = logging.getLogger(__name__)

CATEGORY = "Fast VAE"

AUTO = "auto"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_input(tooltip: str, name: str = "dtype", *, optional: bool = False) -> io.Combo.Input:
    """The choice of a number format; `DTYPES` has it, and nothing for `AUTO`."""
    return io.Combo.Input(
        name,
        options=[AUTO, *DTYPES],
        default=AUTO,
        display_name=name.replace("_", " "),
        optional=optional,
        advanced=True,
        tooltip=tooltip,
    )


def chunk_input(zero: str, *, optional: bool = False) -> io.Int.Input:
    """Latents per step, by what 0 stands for."""
    return io.Int.Input(
        "chunk",
        default=0,
        min=-1,
        max=4096,
        optional=optional,
        advanced=True,
        tooltip=f"Latent frames per step; 4 video frames each. 0: {zero}. -1: all at once. "
        "Less takes less memory; the result is the same.",
    )


def once() -> list[io.Input]:
    """What holds for one run."""
    return [
        dtype_input("Number format, this once. auto: as chosen for the VAE.", optional=True),
        chunk_input("as chosen for the VAE", optional=True),
    ]


def timing_output() -> io.Output:
    """The last output of a node that ends a part of the work."""
    return io.String.Output(
        display_name="timing",
        tooltip="Where the time of this run went so far, as a table: loading, sampling, decoding. "
        "The log has the whole table when the run has ended.",
    )


def log_unused(**options: bool) -> None:
    """One line about options that mean nothing to a VAE that is not ours."""
    names = [name for name, is_set in options.items() if is_set]
    if names:
        _logger.info("Fast Video VAE: this VAE is not a fast one; unused: %s", ", ".join(names))
