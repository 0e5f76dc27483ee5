"""Which kernels serve: those that are built and right on this device, fixed while a video runs.

A kernel that is asked for and not there is built and checked by the background thread; until then
the library serves. What a family needs is known before its first decode: its network runs once on
`meta`, where every op is noted and none is computed. A video sees what was found before it began
(`Snapshot`), so all of its frames come from the same kernels.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..backends import CONVOLUTIONS, ORDER, TRIED, Kernel
from ..convolution.weight import ConvWeight
from ..cuda_ops.driver import relaxed_captures
from ..devices import current as on_device
from ..devices import device_kind, runtime, with_index
from ..native_ops.build import CPU
from ..warmup_log import preparing
from . import background, facts, selfcheck, variants
from .seen import Snapshot, playing, recorder, snapshot

# How the names of checks in the store begin.
_RIGHT = "right: "

# What the store has of a variant that no kernel computes rightly.
_NONE = "none"

_lock = threading.Lock()
_last = _last_proof = 0  # numbers of what was found
# The backend of each variant that was looked at, empty for the library, with its number.
_found: dict[variants.Key, tuple[int, tuple[str, ...]]] = {}
_asked: set[variants.Key] = set()
# Since when a convolution has a tile, by device, dtype, weight and stride.
_tiled: dict[tuple[Any, ...], int] = {}


def next_number(*, proof: bool = False) -> int:
    """Return the number of what is found now: a kernel, or a `proof`."""
    global _last, _last_proof
    with _lock:
        _last += 1
        _last_proof = _last if proof else _last_proof
        return _last


def ours(op: str, args: Sequence[Any], kernel: Kernel | None = None) -> tuple[str, ...]:
    """Return the backend of ours for a call on a GPU; ask for a variant that is not there yet."""
    if not args[0].numel():
        return ()
    key = variants.key_of(op, args, args[0].device, kernel)
    return kernel_of(key, lambda: variants.samples_of(op, args, key))


def kernel_of(key: variants.Key, samples_of: Callable[[], selfcheck.Sample]) -> tuple[str, ...]:
    """Return the backend of a variant, as the thread sees it; without any, let it be built."""
    found, seen = _found.get(key), snapshot()
    if found is None:
        if key not in _asked and not background.is_here():
            sample = samples_of()
            with _lock:
                is_new, _ = key not in _asked, _asked.add(key)
            if is_new:
                background.submit(f"{key.op} of {key.device}", lambda: build(key, sample))
        return ()
    since, names = found
    return names if seen is None or since <= seen.kernels else ()


def _want(
    device: torch.device,
    wanted: dict[variants.Key, selfcheck.Sample],
    kernel: Kernel | None,
    op: str,
    args: Sequence[Any],
    _: Tensor,
) -> None:
    """Note the variants of kernels that a call needs; the library needs none."""
    if op == "conv3d" and kernel is None:
        return
    for given in variants.sizes_of(op, args):
        key = variants.key_of(op, given, device, kernel)
        if key not in _found and key not in wanted:
            wanted[key] = variants.samples_of(op, given, key)


def build(key: variants.Key, sample: selfcheck.Sample) -> None:
    """Build the kernels of a variant on its device, and check them unless that was done before."""
    # The check runs the kernels, which compiles and loads them. It is on a stream of its own.
    if key in _found:
        return
    kept, name = facts.of_kernels(key.device), _RIGHT + variants.name_of(key)
    able = variants.kernels_of(key)  # backends, or the candidate of a convolution
    with apart(key.device), preparing("kernel build", key.op):
        # A call loads what was right in an earlier process from the disk.
        known = kept.get(name)
        names = selfcheck.running(known, key.op, sample) if known in able else ()
        if not names:
            known = kept.once(
                name,
                lambda: "".join(selfcheck.checked(able, key.op, sample)) or _NONE,
                lambda kept: kept == _NONE,
            )
            names = tuple(each for each in able if each == known)
    found = next_number()
    if names and key.kernel is not None:
        _tiled.setdefault((key.device, *key.kinds[:2], key.kinds[-2]), found)
    _found[key] = found, names


def checked_kernels(device: torch.device) -> dict[str, bool]:
    """Return the kernels that were checked on `device` by name, and whether one is right."""
    known = facts.of_kernels(with_index(device)).named(_RIGHT).items()
    return {name.removeprefix(_RIGHT): value in (*ORDER, *CONVOLUTIONS) for name, value in known}


def has_tile(weight: ConvWeight, stride: tuple[int, ...]) -> bool:
    """Return whether a convolution has a tile that serves, or will have one (calls are noted)."""
    if recorder() is not None:
        return True
    since = _tiled.get((weight.device, weight.dtype, weight.shape, stride))
    seen = snapshot()
    return since is not None and (seen is None or since <= seen.kernels)


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Work on `device` in a stream of its own, without an effect on a capture of others."""
    if device.type not in ("cuda", "xpu"):
        yield
        return
    with relaxed_captures(device), on_device(device):
        stream = runtime(device).Stream(device)
        with runtime(device).stream(stream):
            yield
        stream.synchronize()


def library_of(device: torch.device) -> Snapshot:
    """Return what serves on a device without kernels that are built for its videos."""
    return Snapshot(0, 0, native=device_kind(device) == "cpu" and CPU.is_loaded)


class Prepared:
    """What a network needs on a device, which the background thread builds."""

    def __init__(self, device: torch.device, record: Callable[[], object]) -> None:
        # `record` runs the network once on `meta`, with all of its ops and sizes.
        self._device, self._record = with_index(device), record
        self._proofs, self._is_tried = 0, device_kind(device) in TRIED
        self.is_ready = not self._is_tried
        self.job = CPU.prepare() if device.type == "cpu" else self._begun()

    def renew(self) -> None:
        """Begin again after a proof, which changes what is needed; what was there serves on."""
        if self.is_ready and self.job.is_done and self._proofs < _last_proof:
            self.job = self._begun()

    def seen(self) -> Snapshot:
        """Return what a video that begins now may use: all, or the library until all is there."""
        if self._is_tried and self.is_ready:
            return Snapshot(_last, self._proofs, native=False)
        return library_of(self._device)

    def _begun(self) -> background.Job:
        name = f"the build of kernels for {self._device}"
        return background.submit(name, self._work) if self._is_tried else background.DONE

    def _work(self) -> None:
        proofs = _last
        wanted = dict[variants.Key, selfcheck.Sample]()
        note = functools.partial(_want, self._device, wanted)
        with playing(self._device, note, tiles=True):
            self._record()
        for key, sample in wanted.items():
            build(key, sample)
        self._proofs, self.is_ready = proofs, True
