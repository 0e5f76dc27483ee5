"""How layers run: the fastest dtype of a device, full float32, no compilation."""

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ...kernels import fp16_pays, has_bfloat16, lacks, multiplies_bfloat16, slow_on_cpu
from ..validation import dtype_name

_logger = logging.getLogger(__name__)

_NARROW = (torch.float16, torch.bfloat16)

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Owner, name and old value of switches.
_Saved = list[tuple[object, str, object]]

_lock = threading.Lock()
_saved: dict[str, _Saved] = {}  # what to restore after `full_float32`, by kind of device
_holders: list[str] = []  # the kinds of device of the threads inside


def fastest_decode_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype for decoding on `device`.

    On a CPU, bfloat16 if it has instructions for its products. On a GPU, bfloat16 if it computes in
    it. Otherwise float32.
    """
    if device.type == "cpu":
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


def check_computes(dtype: torch.dtype, device: torch.device, name: str = "dtype") -> None:
    """Raise a `ValueError` for the argument `name` if a device does not compute in a dtype."""
    if reason := lacks(device, dtype):
        raise ValueError(
            f"{name} is {dtype_name(dtype)}, but {reason}; expected float32 or float16"
        )


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation: float32 for 16 bits that are slow on a CPU, logged."""
    check_computes(dtype, device)
    if device.type != "cpu" or dtype not in _NARROW:
        return dtype
    with _lock:
        return torch.float32 if _is_slow(dtype) else dtype


def decode_dtype(
    dtype: torch.dtype, device: torch.device, *, allow_fp16: bool, deep: bool = False
) -> torch.dtype:
    """Return the dtype of the computation of a decode for frames in `dtype`."""
    # float16 has three bits more than bfloat16, so the frames are closer to those of float32.
    # Frames for a file of more than 8 bits (`deep`) need these bits, and every GPU computes as fast
    # in float16. Where it overflows, the decode continues in bfloat16 (see `settings`). An encode
    # never does this: a difference in rounding at the start of a sampling becomes another picture,
    # so it must not depend on the speed of the GPU.
    pays = allow_fp16 and dtype == torch.bfloat16
    if pays and ((deep and device.type != "cpu") or fp16_pays(device)):
        return torch.float16
    return compute_dtype(dtype, device)


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 convolutions and products in full float32 on `device` within the block."""
    # PyTorch's switches are global. The first thread that enters saves and sets them, and the last
    # one that leaves restores all, because CUDA and the CPU share some. PyTorch 2.9
    # raises where older switches are read and disagree with those by operation, so both are set.
    with _lock:
        if device.type not in _saved:
            _saved[device.type] = _switch_off(device.type)
        _holders.append(device.type)
    try:
        yield
    finally:
        with _lock:
            _holders.remove(device.type)
            while _saved and not _holders:
                for owner, name, value in _saved.popitem()[1]:  # of the last device first
                    setattr(owner, name, value)


def eager(function: _Function) -> _Function:
    """Run `function` without `torch.compile`, like `torch.compiler.disable`.

    TorchDynamo would break the graph at every layer and recompile each one for every length and
    size, and what Inductor would fuse is already fused. Qwen-Image's VAE became half as fast when
    compiled (unslothai/unsloth#10889).
    """
    # `torch.compiler.disable` imports TorchDynamo, which takes seconds, so it is only called after
    # other code has imported it, as every compilation does.
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, arguments of any function
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def layer_modes(device: torch.device, *, full: bool = False) -> Iterator[None]:
    """Set the modes in which layers run within the block; `full`: with `full_float32`."""
    # Outside inference mode tails and derived weights can be used in both modes.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        full_float32(device) if full else contextlib.nullcontext(),
    ):
        yield


class _Products:
    """`torch.set_float32_matmul_precision` as an attribute; it also sets the older CUDA switch."""

    @property
    def precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @precision.setter
    def precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)


# A switch: owner, name, value for full float32, and all such values; (): it follows the others.
_Switch = tuple[Any, str, object, tuple[object, ...]]


def _switch_off(device_type: str) -> _Saved:
    """Disable every switch that reduces float32, and return the old values."""
    switches = _switches(device_type)
    if all(getattr(owner, name) in full for owner, name, _, full in switches if full):
        return []
    _hide_advice()
    above = _released(device_type)
    try:
        saved = _values(switches)
        for owner, name, value, _ in switches:
            setattr(owner, name, value)
    finally:
        for owner, value in above:
            owner.fp32_precision = value
    return saved


def _switches(device_type: str) -> list[_Switch]:
    """Return the switches of a kind of device, older ones first: they set newer ones too."""
    backends: Any = torch.backends
    products: _Switch = (_Products(), "precision", "highest", ("highest",))
    if not hasattr(backends.cudnn, "conv"):  # torch < 2.9
        older: _Switch = (backends.cudnn, "allow_tf32", False, (False,))
        return {"cuda": [older, products], "cpu": [products]}.get(device_type, [])

    def newer(*owners: object) -> list[_Switch]:
        return [(owner, "fp32_precision", "ieee", ("ieee", "none")) for owner in owners]

    if device_type == "cpu":
        return newer(backends.mkldnn.conv, backends.mkldnn.matmul)
    if device_type != "cuda":
        return []
    return [
        (backends.cudnn, "allow_tf32", False, ()),
        (*products[:3], ()),
        *newer(backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul),
        (backends.mkldnn.matmul, "fp32_precision", "ieee", ()),  # `products` sets it
    ]


def _released(device_type: str) -> list[tuple[Any, str]]:
    """Reset the switches from which others inherit, and return them with their values."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return []
    above = []
    for owner in (backends, backends.cudnn) if device_type == "cuda" else (backends,):
        value = owner.fp32_precision
        if value != "none":
            above.append((owner, value))
            owner.fp32_precision = "none"
    return above


def _values(switches: list[_Switch]) -> _Saved:
    """Return owner, name and value of every switch, even if the older ones cannot be read."""
    new = "fp32_precision"
    newer: _Saved = [
        (owner, new, owner.fp32_precision) for owner, name, *_ in switches if name == new
    ]
    older: _Saved = []
    for owner, name, value, _ in (each for each in switches if each[1] != new):
        try:
            found = getattr(owner, name)
        except RuntimeError:  # it disagrees with the newer ones
            for other, *_ in newer:
                setattr(other, new, "none")
            try:
                found = getattr(owner, name)
            except RuntimeError:
                found = not value  # "none" agrees with `value`
        older.append((owner, name, found))
    return older + newer


@functools.cache
def _hide_advice() -> None:
    """Hide the warning of PyTorch 2.9 that the older switches are used at all."""
    warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Return whether convolutions in `dtype` are slow on this CPU, and log it once."""
    if not slow_on_cpu(dtype):
        return False
    name = dtype_name(dtype)
    line = "this CPU has no instructions for %s convolutions; computing in float32, results stay %s"
    _logger.warning("Fast Video VAE: " + line, name, name)
    return True
