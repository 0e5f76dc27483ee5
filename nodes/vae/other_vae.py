"""A VAE that is not ours at work: it decodes and encodes as it always does.

Whatever it raises names the input that it could not work on, but for the host's own: memory that
ran out, for which ComfyUI unloads its models, and the user's stop.
"""

from collections.abc import Callable
from typing import Any

import comfy.model_management
from torch import Tensor

from ..host import timing
from ..host.error_text import described


def decoded(vae: Any, latent: Tensor) -> Tensor:  # noqa: ANN401, any VAE
    """What it makes of a latent: an IMAGE, of most VAEs.

    Raises:
        ValueError: It cannot.
    """
    with timing.span("VAE decode"):
        return _asked("samples", "decodes", lambda: vae.decode(latent), latent)


def encoded(vae: Any, images: Tensor, name: str = "pixels") -> Tensor:  # noqa: ANN401, any VAE
    """The latent that it makes of an IMAGE.

    Raises:
        ValueError: It cannot; the message begins with `name`.
    """
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
        text = str(error).strip().partition("\n")[0]
        # With the place of the failure, which ComfyUI shows below the message.
        raise ValueError(
            f"{name}: this VAE, which is no fast one, {does} no "
            f"{described(given).partition(' ')[2]}: {type(error).__name__}: {text}"
        ).with_traceback(error.__traceback__) from error
