"""The allocations of a stream, counted on the `meta` device: the oracle of the memory plan.

The stream runs unchanged, except for the steps that need a real device: checks of values (finite
inputs, stale weights, static frames), autocast, and caches on the host.
"""

import contextlib
import functools
import weakref
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fast_video_vae.kernels import Fused, backends, modules
from fast_video_vae.kernels.convolution.fused import result_of
from fast_video_vae.tests.benchmarks import bench_memory, count_bytes
from fast_video_vae.tests.benchmarks.bench_memory import Case
from fast_video_vae.tests.benchmarks.weights import random_weights
from fast_video_vae.vae import VideoVAE, load_vae, validation
from fast_video_vae.vae.models import base
from fast_video_vae.vae.streaming import session


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live storages that ops create: now (`live`), and at most (`peak`)."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of `tensor`, which existed before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::convolution":
            result = count_bytes.channels_last(result)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.remove(key)
        self.live -= nbytes


class Empty:
    """A candidate of the convolutions that fuses what it is given, and only allocates."""

    def __init__(self, fused: Fused) -> None:
        self._fused = fused

    def refuse(self, x):
        pass

    def launches(self):
        return {"conv3d": self._conv3d}

    def fuses(self, weight):
        return self._fused

    def _conv3d(self, x, weight, *others):
        *_, tail, out, stride, padding, _ = others
        weight.plain()
        return result_of(x, weight, tail, out, stride, padding)


def live_peak(case: Case, fused: Fused | None = None) -> tuple[int, int]:
    """Return the peak bytes of a stream without weights and input, and the estimate of its plan.

    With `fused` the convolutions are those of a candidate that fuses this.
    """
    vae = meta_vae(case.family, case.width, case.dtype)
    with contextlib.ExitStack() as stack:
        if fused is not None:
            order = "sliced", *backends.CONVOLUTION_ORDER
            stack.enter_context(mock.patch.dict(modules._loaded, sliced=Empty(fused)))
            stack.enter_context(mock.patch.object(backends, "CONVOLUTION_ORDER", order))
        # Routes of other calls are kept with the layers.
        stack.enter_context(mock.patch.object(base, "route_conditions", return_value=fused))
        # What needs values: checks, and autocast.
        for target, name, value in (
            (validation, "check_finite", lambda *_: None),
            (session, "drop_stale_forms", lambda *_: None),
            (torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # The first stream derives weights, which count as weights.
        small = replace(case, size=(64, 64), tile=None, limit_bytes=1 << 40)
        bench_memory.stream(vae, small, bench_memory.input_of(vae, small))
        given = bench_memory.input_of(vae, case)
        counter = LiveBytes()
        for tensor in (given, *vae.parameters()):
            counter.ignore(tensor)
        stack.enter_context(bench_memory.cut_at(case.cut))
        estimate = bench_memory.planned(vae, case).peak_bytes  # kept, so that no plan is counted
        with counter, count_bytes.FusedAttention():
            bench_memory.stream(vae, case, given)
        return counter.peak, estimate


@functools.cache
def meta_vae(family: str, width: int, dtype: str) -> VideoVAE:
    """Return a VAE with weights of no value."""
    kind = getattr(torch, dtype)
    vae = load_vae(random_weights(family, width, width), dtype=kind, encode_dtype=kind).to("meta")
    vae.skips_static = False
    return vae
