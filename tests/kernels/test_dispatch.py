"""The order in which backends are called, and the error if all of them refuse."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import BackendError, backends, dispatch, errors, modules, use_backend
from fast_video_vae.kernels.backends import forced
from fast_video_vae.kernels.errors import Refusal, log_once
from fast_video_vae.tests.kernels.cases import DTYPES, OPS, SERVED, inputs, random, video


@pytest.fixture
def team(monkeypatch):
    """Replace the backends: `first` runs positive numbers, `second` even ones."""
    asked = []

    def first(x, *, by=1):
        asked.append("first")
        if x <= 0:
            raise Refusal(f"x is {x}")
        return "first", x * by

    def second(x, *, by=1):
        asked.append("second")
        if x % 2:
            raise Refusal("x is odd")
        return "second", x * by

    for module in (backends, dispatch):
        monkeypatch.setattr(module, "ORDER", ("first", "second"))
    monkeypatch.setattr(
        modules,
        "_loaded",
        {"first": SimpleNamespace(op=first), "second": SimpleNamespace(op=second, other=second)},
    )
    return asked


def test_the_first_backend_that_accepts_a_call_runs_it(team):
    assert dispatch.run("op", 3, by=2) == ("first", 6)
    assert team == ["first"]
    assert dispatch.run("op", -2) == ("second", -2)
    assert team == ["first", "first", "second"]
    assert dispatch.run("other", 2) == ("second", 2)  # which the first has not


def test_run_kernel_never_uses_the_reference(team, monkeypatch):
    monkeypatch.setattr(dispatch, "ORDER", ("first", "reference"))
    assert dispatch.run_kernel("op", 3, by=2) == ("first", 6)
    assert dispatch.run_kernel("op", -2) is None
    assert team == ["first", "first"]
    x, leaf = torch.ones(2, 8), torch.ones(2, 8, requires_grad=True)
    assert kernels.run_kernel("silu_mul", leaf, x) is None


def test_the_error_lists_every_reason_in_one_line(team):
    with pytest.raises(BackendError) as caught:
        dispatch.run("op", -1)
    assert str(caught.value) == "no backend runs this op (first: x is -1; second: x is odd)"
    with pytest.raises(BackendError) as caught:
        dispatch.run("other", 1)
    reasons = "first: the backend has no such op; second: x is odd"
    assert str(caught.value) == f"no backend runs this other ({reasons})"
    assert isinstance(caught.value, ValueError)


def test_a_chosen_backend_never_falls_back(team):
    with use_backend("first"), pytest.raises(BackendError, match="first: x is -2"):
        dispatch.run("op", -2)
    with use_backend("second"):
        assert dispatch.run("op", 2) == ("second", 2)
    assert team == ["first", "second"]


def test_ask_does_not_force_the_backend(team):
    assert dispatch.ask("second", "op", 2) == ("second", 2)
    with pytest.raises(Refusal, match="x is odd"):
        dispatch.ask("second", "op", 1)
    assert forced() is None
    with use_backend("second"):
        assert forced() == "second"


def test_the_choice_ends_with_its_block(team):
    with use_backend("second"):
        with use_backend("first"):
            assert dispatch.run("op", 2) == ("first", 2)
        assert dispatch.run("op", 2) == ("second", 2)
        with pytest.raises(RuntimeError, match="inside"), use_backend("first"):
            raise RuntimeError("inside")
        assert dispatch.run("op", 2) == ("second", 2)
    assert dispatch.run("op", 2) == ("first", 2)


def test_a_choice_holds_for_its_thread_only(team):
    served = []

    def work():
        served.append(dispatch.run("op", 2)[0])
        with use_backend("first"):
            served.append(dispatch.run("op", 2)[0])

    with use_backend("second"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert dispatch.run("op", 2)[0] == "second"
    assert served == ["first", "first"]


def test_an_unknown_backend_lists_the_known_ones():
    known = "triton, cuda, native, reference, hopper, aten, sliced"
    with pytest.raises(ValueError, match=f"backend is 'metal'; expected one of {known}$"):
        use_backend("metal").__enter__()


def test_an_error_of_a_backend_is_not_a_refusal(monkeypatch):
    def breaks():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(dispatch, "ORDER", ("broken", "reference"))
    monkeypatch.setattr(modules, "_loaded", {"broken": SimpleNamespace(op=breaks)})
    with pytest.raises(RuntimeError, match="out of memory"):
        dispatch.run("op")


def test_a_missing_backend_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(errors, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for message in ("no compiler", "no compiler", "no driver"):
            log_once(message)
    assert [record.getMessage() for record in caplog.records] == [
        "Fast Video VAE: no compiler", "Fast Video VAE: no driver",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_a_backend_runs_its_ops_and_refuses_others(backend, op, dtype):
    args, keywords = inputs(op, dtype)
    if (backend, op, dtype) in SERVED:
        assert getattr(kernels, op)(*args, **keywords) is not None
    else:
        with pytest.raises(BackendError, match=f"no backend runs this {op} \\({backend}: .+\\)$"):
            getattr(kernels, op)(*args, **keywords)


@pytest.mark.parametrize("op", [*OPS, "conv2d", "conv3d"])
def test_a_tensor_that_requires_a_gradient_is_refused(op):
    convolution = (video(1, 8, 3, 4, 4), random(8, 8, 1, 1, 1)), {}
    if op == "conv2d":
        convolution = tuple(each[:, :, 0] for each in convolution[0]), {}
    args, keywords = inputs(op, torch.float32) if op in OPS else convolution
    tensors = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for n in tensors:
        given = [*args[:n], args[n].clone().requires_grad_(), *args[n + 1 :]]
        with pytest.raises(ValueError, match=f"^a tensor of {op} requires a gradient; expected"):
            getattr(kernels, op)(*given, **keywords)
        with torch.no_grad():
            assert not getattr(kernels, op)(*given, **keywords).requires_grad
    if op == "silu_mul":
        with pytest.raises(ValueError, match="requires a gradient"):
            kernels.silu_mul(*args, out=args[0].clone().requires_grad_())
