"""Widgets that several nodes share."""

import logging

import torch

from .api import io
from .devices import OpenInput, is_selection
from .error_text import described

_logger = logging.getLogger(__name__)

CATEGORY = "Fast VAE"

AUTO = "auto"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_input(tooltip: str, name: str = "dtype", *, optional: bool = False) -> io.Combo.Input:
    """Return the choice of a dtype, a key of `DTYPES` or `AUTO`."""
    return io.Combo.Input(
        name,
        options=[AUTO, *DTYPES],
        default=AUTO,
        display_name=name.replace("_", " "),
        optional=optional,
        advanced=True,
        tooltip=tooltip,
    )


INT8 = "int8"
PRECISIONS = (AUTO, INT8)

# A removed choice, which means `INT8`.
INT8_AND_ENCODE = "int8 and encode"

# Workflows keep values by position: older ones have those of a removed widget, or the devices.
_REMOVED = (INT8_AND_ENCODE, "exact", "fast")


def check_precision(value: object) -> str:
    """Return a key of `PRECISIONS`, or what older workflows have in this place."""
    if isinstance(value, str) and (value in (*PRECISIONS, *_REMOVED) or is_selection(value)):
        return value
    raise ValueError(f"got {described(value)}; expected one of: {', '.join(PRECISIONS)}")


def precision_input(auto: str) -> io.Combo.Input:
    """Return the choice of a precision, one of `PRECISIONS`, with `auto` as its default."""
    return OpenInput(
        "precision",
        check_precision,
        options=list(PRECISIONS),
        default=AUTO,
        advanced=True,
        tooltip=f"Precision of the large convolutions. auto: {auto}. int8: decode with 8-bit "
        "numbers where that costs least: faster on NVIDIA GPUs from Ampere on, at most about 1 dB "
        "below bf16. VAE Benchmark (Fast) shows both with your VAE.",
    )


def chunk_input(zero: str, *, optional: bool = False) -> io.Int.Input:
    """Return the input for latents per step, with `zero` as the meaning of 0, `optional` or not."""
    return io.Int.Input(
        "chunk",
        default=0,
        min=-1,
        max=4096,
        optional=optional,
        advanced=True,
        tooltip=f"Latent frames per step (4 video frames each). 0: {zero}. -1: all at once. "
        "Smaller values use less memory; the result is the same.",
    )


def fps_input(tooltip: str) -> io.Float.Input:
    """Return the input for the frames per second of a video, with the text of its `tooltip`."""
    return io.Float.Input("fps", default=16.0, min=0.01, max=1000.0, step=0.01, tooltip=tooltip)


def once() -> list[io.Input]:
    """Return the inputs that hold for one run."""
    return [
        dtype_input("Data type for this run only. auto: the setting of the VAE.", optional=True),
        chunk_input("the setting of the VAE", optional=True),
    ]


def timing_output() -> io.Output:
    """Return the last output of nodes that end a part of the work."""
    return io.String.Output(
        display_name="timing",
        tooltip="Table of the time spent in this run so far: loading, sampling, decoding. The "
        "log has the complete table at the end of the run.",
    )


def log_unused(**options: bool) -> None:
    """Log in one line which `options` are set but have no meaning for a VAE of another kind."""
    names = [name for name, is_set in options.items() if is_set]
    if names:
        _logger.info("Fast Video VAE: this VAE is not a fast one; unused: %s", ", ".join(names))
