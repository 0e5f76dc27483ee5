"""Who is asked: one backend alone, or whoever takes a call."""

from contextlib import nullcontext
from itertools import groupby

import pytest
import torch

from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.kernels.backends import ORDER
from fast_video_vae.tests.kernels.cases import PLAYED, missing, place

# How many of the combinations of its parameters a test tries by default where a GPU is played.
_EXAMPLES = 3


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
    """By default one dtype, and few combinations where a GPU is played: the others are slow.

    bfloat16 is what the VAEs run in, and rounds most. A program of a GPU that is played takes
    milliseconds.
    """
    for _, group in groupby(items, lambda item: getattr(item, "function", None)):
        together = [item for item in group if hasattr(item, "callspec")]
        narrow = any(item.callspec.params.get("dtype") is torch.bfloat16 for item in together)
        for item in together:
            if narrow and item.callspec.params.get("dtype", torch.bfloat16) is not torch.bfloat16:
                item.add_marker(pytest.mark.slow)
        for backend in PLAYED:
            mine = [
                item
                for item in together
                if backend in (item.callspec.params.get("backend"), item.callspec.params.get("ask"))
                and not item.get_closest_marker("slow")
            ]
            spread = {(len(mine) - 1) * n // (_EXAMPLES - 1) for n in range(_EXAMPLES)}
            for n, item in enumerate(mine):
                if n not in spread:
                    item.add_marker(pytest.mark.slow)


@pytest.fixture(params=ORDER)
def backend(request):
    """Every backend in turn; one that this machine does not have skips the test."""
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    with use_backend(request.param), place(request.param):
        yield request.param


@pytest.fixture(params=[*ORDER, "any"])
def ask(request):
    """Call an op of every backend in turn, then of whoever takes it.

    The result is None where a backend refuses, which the reference may not, nor all together.
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
