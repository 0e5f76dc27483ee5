"""Devices of all kinds under one set of names."""

from .kinds import (
    GPUS,
    amd_chip,
    current,
    default_device,
    device_kind,
    device_name,
    has_bfloat16,
    indexed,
    is_rocm,
    lacks,
    runtime,
    searches_shapes,
    synchronize,
)
from .memory import host_bytes, memory_bytes, release_cached, tensor_limit
from .miopen import unsearched

__all__ = [
    "GPUS",
    "amd_chip",
    "current",
    "default_device",
    "device_kind",
    "device_name",
    "has_bfloat16",
    "host_bytes",
    "indexed",
    "is_rocm",
    "lacks",
    "memory_bytes",
    "release_cached",
    "runtime",
    "searches_shapes",
    "synchronize",
    "tensor_limit",
    "unsearched",
]
