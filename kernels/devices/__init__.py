"""Devices of all kinds under one set of names."""

# ruff: noqa: F401 (names for other files)

from .kinds import (
    GPUS,
    amd_chip,
    current,
    default_device,
    device_kind,
    device_name,
    has_bfloat16,
    has_own_memory,
    is_rocm,
    lacks,
    runtime,
    searches_shapes,
    sums_float64,
    synchronize,
    with_index,
)
from .memory import host_bytes, memory_bytes, release_cached, tensor_limit
from .miopen import always_searches, unsearched
