"""Failing memory: the k-th allocation raises the error of a real allocator."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB "
        "of which 11.25 MiB is free. Process 2310 has 7.60 GiB memory in use.\n"
        "See documentation for Memory Management."
    ),
    "linux": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 20971520 bytes. Error code 12 (Cannot allocate memory)\n"
    ),
    "windows": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:95] data. DefaultCPUAllocator: not enough memory: "
        "you tried to allocate 20971520 bytes."
    ),
}


class FailingMemory(TorchDispatchMode):
    """Counts the ops that allocate, and makes some of them raise before they compute.

    Args:
        first: First allocation that fails, counted from 1; 0: none.
        count: Allocations in a row that fail.
        every: Allocations whose number is a multiple of this also fail; 0: none.
        most: Largest allocation that succeeds, in bytes; None: any size.
        error: Key of `ERRORS`.

    Attributes:
        seen: Allocations so far, failed ones included.
        failed: Failed allocations.
        largest: Bytes of the largest allocation.
    """

    def __init__(self, first=0, count=1, *, every=0, most=None, error="cuda"):
        super().__init__()
        self.every = every
        self.first, self.count, self.most, self.error = first, count, most, error
        self.seen = self.failed = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not allocates(func) or _is_of_a_plan(args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self.seen += 1
        in_a_row = 0 < self.first <= self.seen < self.first + self.count
        if in_a_row or (self.every and self.seen % self.every == 0):
            self.failed += 1
            raise ERRORS[self.error]()
        result = func(*args, **(kwargs or {}))
        nbytes = sum(y.nbytes for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor))
        if self.most is not None and nbytes > self.most:
            self.failed += 1
            raise ERRORS[self.error]()
        self.largest = max(self.largest, nbytes)
        return result


def allocates(func):
    """Return whether an op returns tensors that are neither its inputs nor views of them."""
    return any(
        "Tensor" in str(result.type) and result.alias_info is None
        for result in func._schema.returns
    )


def _is_of_a_plan(args, kwargs):
    """Return whether a call is on `meta`, as those that measure a plan, and takes no memory."""
    found = pytree.tree_leaves((args, kwargs))
    return any(x.is_meta for x in found if isinstance(x, torch.Tensor)) or (
        torch.device("meta") in found
    )
