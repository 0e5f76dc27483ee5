"""Fixtures that run a test with one backend, or with any backend that accepts the call."""

from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch

from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.tests.kernels.cases import PLAYED, missing, place

# Parameter combinations per test and dtype that run each day on an emulated GPU.
_EXAMPLES = 3

_ON_CPU = ("native", "reference")


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items):
    """Mark all but one dtype as slow, and most combinations on an emulated GPU as nightly.

    The default dtype is bfloat16: the VAEs run in it, and it rounds most. A CPU's own backends run
    float32 too, in which it decodes. On an emulated GPU one program takes milliseconds.
    """
    groups = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            groups[item.function, item.callspec.params.get("op")].append(item)
    for together in groups.values():
        narrow = any(item.callspec.params.get("dtype") is torch.bfloat16 for item in together)
        for item in together:
            given = item.callspec.params
            usual = given.get("dtype", torch.bfloat16) is torch.bfloat16
            usual = usual or (given["dtype"] is torch.float32 and given.get("backend") in _ON_CPU)
            if narrow and not usual:
                item.add_marker(pytest.mark.slow)
        for backend in PLAYED:
            mine = defaultdict(list)
            for item in together:
                given = item.callspec.params
                if backend in (given.get("backend"), given.get("ask")):
                    mine[given.get("dtype") if narrow else None].append(item)
            for same in mine.values():
                # The first, the last and one between them stay.
                spread = {(len(same) - 1) * n // (_EXAMPLES - 1) for n in range(_EXAMPLES)}
                for n, item in enumerate(same):
                    if n not in spread:
                        item.add_marker(pytest.mark.nightly)


@pytest.fixture(params=ORDER)
def backend(request):
    with use_backend(request.param):
        yield from _placed(request.param)


@pytest.fixture(params=[*ORDER, "any"])
def ask(request):
    """Return a function that calls an op with one backend, or with any backend that accepts it.

    Its result is None where the backend refuses the call. The reference, and all backends
    together, must not refuse.
    """
    name = request.param
    reason = None if name == "any" else missing(name)
    if reason:
        pytest.skip(reason)

    def call(op, *args, **kwargs):
        try:
            with nullcontext() if name == "any" else use_backend(name):
                return op(*args, **kwargs)
        except BackendError:
            if name in ("any", "reference"):
                raise
            return None

    with place(name):
        yield call


def _placed(backend):
    if reason := missing(backend):
        pytest.skip(reason)
    with place(backend):
        yield backend


@pytest.fixture
def on_triton():
    yield from _placed("triton")


@pytest.fixture
def on_cuda():
    yield from _placed("cuda")
