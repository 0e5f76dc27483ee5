"""Memory on the host that a GPU copies to and from while it computes."""

import torch
from torch import Tensor

from ..kernels import log_once

# Most characters of an error in the log.
_REASON_LENGTH = 80


def pinned_memory(nbytes: int) -> Tensor | None:
    """Return uninitialised pinned memory `[nbytes]`, uint8, or None, noted once, if refused."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:_REASON_LENGTH]
        log_once(
            f"memory cannot be pinned ({reason}), so copies to and from the GPU are slower; "
            "free memory, or raise the limit of locked memory"
        )
        return None
