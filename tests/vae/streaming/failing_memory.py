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
    """Counts the ops that allocate, and lets `count` of them raise from the `first` on; 0: none."""

    def __init__(self, first=0, count=1, *, error="cuda"):
        super().__init__()
        self.first, self.count, self.error = first, count, error
        self.seen = self.failed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not allocates(func) or _is_of_a_plan(args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self.seen += 1
        if 0 < self.first <= self.seen < self.first + self.count:
            self.failed += 1
            raise ERRORS[self.error]()
        return func(*args, **(kwargs or {}))


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
