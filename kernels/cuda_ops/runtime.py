"""Launch of a kernel: it is compiled and loaded when a call first needs it.

Environment:
    FAST_VIDEO_VAE_CUDA: 0 disables this backend.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..backends import forced
from ..errors import Refusal, first_line, is_out_of_memory, log_once
from .binaries import binary, kernels
from .compiler import architecture, compiler
from .driver import Module, driver

# Most blocks of a launch, each of which does several items: some hundred per multiprocessor, so
# that the last ones take no time.
_MOST_BLOCKS = 1 << 16

# Names of the dtypes in the sources.
NAMES = {
    torch.float32: "float",
    torch.bfloat16: "bfloat16",
    torch.float16: "half",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
}

# Compiled kernels, or the reason why there are none, by device, source and constants.
_modules: dict[tuple[int, str, frozenset[tuple[str, object]]], Module | str] = {}
_lock = threading.Lock()


def refuse_device(device: torch.device) -> None:
    """Refuse devices other than GPUs, before anything is loaded."""
    if device.type != "cuda":
        raise Refusal(f"the tensors are on {device.type}; cuda needs an NVIDIA or AMD GPU")
    if forced() not in ("cuda", "hopper") and os.environ.get("FAST_VIDEO_VAE_CUDA") == "0":
        raise Refusal("FAST_VIDEO_VAE_CUDA=0 disables it")


def refuse_counts(*counts: int) -> None:
    """Refuse counts of items, pixels or packs that do not fit into 31 bits."""
    if max(counts) >= 1 << 31:
        raise Refusal("more items than 31 bits count")


def launch(
    source: str,
    kernel: str,
    like: Tensor,
    items: int,
    threads: tuple[int, int],
    arguments: bytes,
    **constants: object,
) -> None:
    """Launch a kernel of `source` on PyTorch's current stream of the device of `like`."""
    # A block does one or more items. `constants` are macros of the source other than the dtype,
    # which is that of `like`. A `Refusal` comes before anything is written.
    device = like.device
    with here(device):
        module = loaded(source, {"DTYPE": NAMES[like.dtype], **constants}, device)
        try:
            blocks = min(items, _MOST_BLOCKS)
            module.launch(kernel, blocks, threads, arguments, stream(device))
        except RuntimeError as error:
            raise RuntimeError(f"the kernel {kernel} did not start: {error}") from error


def loaded(source: str, constants: Mapping[str, object], device: torch.device) -> Module:
    """Return the kernels of a source on a device, which is current, or refuse."""
    key = device.index or 0, source, frozenset(constants.items())
    found = _modules.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise Refusal("nothing is loaded while a CUDA graph is captured")
        with _lock:
            found = _modules.get(key)
            if found is None:
                found = _modules[key] = _load(source, constants, device)
    if isinstance(found, str):
        raise Refusal(found)
    return found


def _load(source: str, constants: Mapping[str, object], device: torch.device) -> Module | str:
    try:
        found = compiler()
        code = binary(found, source, constants, architecture(found, device))
        shared = int(str(constants.get("SHARED", 0)))
        return driver().load(code, kernels(source), device.index or 0, shared)
    except Refusal as refusal:
        return str(refusal)
    except Exception as error:  # whatever the compiler and the driver raise
        if is_out_of_memory(error):
            raise
        cause = first_line(error)
        # A driver or compiler that fails does so for every source.
        if not any(isinstance(found, str) for found in _modules.values()):
            log_once(
                f"cuda: its kernels failed ({cause}); a slower backend runs such calls. Try "
                "another driver or PyTorch"
            )
        return f"its kernels for {source} failed ({cause})"


def here(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, which a launch needs."""
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def stream(device: torch.device) -> int:
    """Return the handle of PyTorch's current stream of `device`."""
    return torch.cuda.current_stream(device).cuda_stream
