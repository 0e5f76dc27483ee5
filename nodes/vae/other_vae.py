"""Encode and decode with a VAE of another kind.

Errors name the input, except for ComfyUI's own: out of memory, after which ComfyUI unloads models,
and the user's stop.
"""

from collections.abc import Callable
from typing import Any

import comfy.model_management
from torch import Tensor

from ...kernels import first_line
from ..host import timing
from ..host.error_text import described


def decoded(vae: Any, latent: Tensor) -> Tensor:  # noqa: ANN401, any VAE
    """Decode `latent` `[B, C, ...]` with another VAE, usually to an IMAGE `[N, H, W, C]`."""
    with timing.span("VAE decode"):
        return _asked("samples", "decodes", lambda: vae.decode(latent), latent)


def encoded(vae: Any, images: Tensor, name: str = "pixels") -> Tensor:  # noqa: ANN401, any VAE
    """Encode an IMAGE `[N, H, W, C]` with another VAE; errors start with `name`."""
    with timing.span("VAE encode"):
        return _asked(name, "encodes", lambda: vae.encode(images), images)


def _asked(name: str, does: str, call: Callable[[], Tensor], given: Tensor) -> Tensor:
    try:
        return call()
    except comfy.model_management.InterruptProcessingException:
        raise
    except Exception as error:
        if comfy.model_management.is_oom(error):
            raise
        # With the traceback of the failure, which ComfyUI shows below the message.
        raise ValueError(
            f"{name}: this VAE, which is not a fast one, {does} no "
            f"{described(given).partition(' ')[2]}: {type(error).__name__}: {first_line(error)}"
        ).with_traceback(error.__traceback__) from error
