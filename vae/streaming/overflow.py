"""What follows when the frames of a decode are not finite: `Watch` in `output.py` has seen it.

float16 ends at 65504, where bfloat16 has the range of float32. Underflow is not looked for: below
6e-5 float16 has fewer bits than above. Weights of published VAEs are far larger, and norms keep the
activations near 1.
"""

import logging
import threading
from typing import Protocol

import torch

from ...kernels import device_name, log_once
from ..validation import dtype_name
from .options import StreamOptions
from .settings import Setting

_logger = logging.getLogger(__name__)

# Threads can decode with one VAE.
_lock = threading.Lock()


class RangeError(ArithmeticError):
    """A piece of a decode has values that its dtype cannot hold; a wider one has to follow."""


class NarrowVAE(Protocol):
    """What this module needs of a `VideoVAE`; see there."""

    allow_fp16: bool
    is_finite: bool
    graphs: bool

    def proved(self, setting: Setting) -> Setting:
        """Return the setting without what its device computes wrongly."""
        ...

    def drop_derived(self) -> None:
        """Free the weights in other dtypes and layouts."""


def allows_fp16(vae: NarrowVAE, options: StreamOptions) -> bool:
    """Return whether a decode may compute in float16: no dtype is chosen, and none overflowed."""
    return vae.allow_fp16 and options.dtype is None


def report_nan(at: int, setting: Setting, following: Setting) -> None:
    """Log how a decode goes on after a frame `at` that is not finite, though no dtype is narrow."""
    device = device_name(setting.device)
    where = f"frame {at} is not finite in a decode on {device}, though its latent is"
    if following.watched:
        how = f"the reference ops in {dtype_name(following.dtype)} continue this video"
        # fp16 has a small range.
        how += "; please report it with `info --check`" * (setting.dtype != torch.float16)
    else:
        how = "nor with the reference ops; the weights of this VAE may be damaged"
    _logger.warning("Fast Video VAE: %s; %s", where, how)


def remember(vae: NarrowVAE, at: int, *, coded: bool) -> None:
    """Log the overflow in frame `at`, and let later decodes of `vae` begin without float16."""
    with _lock:
        is_first, vae.allow_fp16 = vae.allow_fp16, vae.allow_fp16 and coded
    if coded:
        log_once(f"values were out of the range of int8 in a decode; 16 bits from frame {at} on")
    elif is_first:
        _logger.warning(
            "Fast Video VAE: float16 overflowed in a decode; bfloat16 from frame %d on, and in "
            "later decodes of this VAE",
            at,
        )
    if not vae.graphs:  # a graph of another thread may read them
        vae.drop_derived()
