"""A smaller card: PyTorch gets less memory of a large one, and the plan sees what is left of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .variants import replaced


@contextmanager
def smaller_card(device: torch.device, free_bytes: int | None) -> Iterator[None]:
    """Let PyTorch allocate at most `free_bytes` above what it has reserved on `device`.

    `torch.cuda.mem_get_info` returns what is left of that, as on a card of this size. PyTorch's
    cache must be released before, or its blocks would add to the card.

    Args:
        device: A CUDA device; nothing changes on another one.
        free_bytes: Free memory of the card; None: the card as it is.
    """
    if device.type != "cuda" or free_bytes is None:
        yield
        return
    total = torch.cuda.memory_reserved(device) + free_bytes

    def left(_: object = None) -> tuple[int, int]:
        return max(0, total - torch.cuda.memory_reserved(device)), total

    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory):
            stack.enter_context(replaced(module, "mem_get_info", left))
        share = total / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, device)
        yield
