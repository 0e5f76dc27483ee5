"""The matrix of ops and backends: every op is in it, and what it says holds."""

import inspect
import re

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import backends, dispatch, use_backend
from fast_video_vae.kernels import support as matrix
from fast_video_vae.kernels.errors import Refusal


@pytest.fixture(scope="module")
def entries():
    return matrix.backend_matrix()


def test_it_has_every_op_of_the_contract_backend_and_dtype_once(entries):
    found = [(each.op, each.backend, each.dtype) for each in entries if each.device == "cpu"]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    ops = re.findall(r"^\| `(\w+)` \|", kernels.__doc__, flags=re.MULTILINE)
    defined = [
        name
        for name in kernels.__all__
        if inspect.isfunction(getattr(kernels, name))
        and getattr(kernels, name).__module__ == kernels.__name__
    ]
    assert sorted(ops) == sorted(defined)
    assert found == [(op, name, dtype) for op in ops for name in backends.ORDER for dtype in dtypes]


def test_the_reference_takes_everything_and_is_exact(entries):
    mine = [each for each in entries if each.backend == "reference"]
    assert all(each.reason is None and each.exact for each in mine)


def test_a_refusal_has_a_reason_and_is_not_exact(entries):
    for each in entries:
        if each.reason is not None:
            assert each.reason
            assert not each.reason.endswith(".")
            assert not each.exact


def test_exact_means_the_bits_of_the_reference(entries, monkeypatch):
    """The calls of the matrix again, with their results kept."""
    results = {}
    real = dispatch.ask

    def kept(name, op, *arguments, **options):
        result = real(name, op, *arguments, **options)
        results[op] = result
        return result

    monkeypatch.setattr(matrix, "ask", kept)
    for each in entries:
        if not each.exact or each.backend == "reference":
            continue
        found = []
        for name in (each.backend, "reference"):
            matrix._refusal(each.op, each.device, name, each.dtype)
            found.append(results.pop(each.op))
        assert torch.equal(*found), each


def test_asking_leaves_the_choices_of_the_caller_alone():
    with use_backend("reference"):
        asked = matrix.backend_matrix()
        assert backends.forced() == "reference"
    assert asked == matrix.backend_matrix()
    assert backends.forced() is None


def test_a_refusal_of_a_backend_is_told_in_its_words(monkeypatch):
    from types import ModuleType

    def refuses(*_, **__):
        raise Refusal("the moon is not (yet) full")

    module = ModuleType("moon")
    for op in {each.op for each in matrix.backend_matrix()}:
        setattr(module, op, refuses)
    monkeypatch.setitem(dispatch._loaded, "native", module)
    reasons = {each.reason for each in matrix.backend_matrix() if each.backend == "native"}
    assert reasons == {"the moon is not (yet) full"}
