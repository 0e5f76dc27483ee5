"""Who is asked: one backend alone, or whoever takes a call."""

from contextlib import nullcontext

import pytest

from fast_video_vae.kernels import BackendError, use_backend
from fast_video_vae.kernels.backend import ORDER
from fast_video_vae.tests.kernels.cases import missing


@pytest.fixture(params=ORDER)
def backend(request):
    """Every backend in turn; one that this machine does not have skips the test."""
    reason = missing(request.param)
    if reason:
        pytest.skip(reason)
    with use_backend(request.param):
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

    return call
