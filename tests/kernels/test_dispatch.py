"""The order in which backends are called, and the error if all of them refuse."""

from itertools import product

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import (
    BackendError,
    ConvWeight,
    Fallback,
    Snapshot,
    conv_route,
    modules,
    seeing,
    use_backend,
)
from fast_video_vae.kernels.backends import ORDER, convolution_order, forced
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels.cases import DTYPES, OPS, SERVED, inputs, random, video

X = torch.ones(2, 8)


class Backend:
    """A backend with one launch, `silu_mul`, which refuses some numbers."""

    def __init__(self, name, asked, refuses):
        self.name, self.asked, self.refuses = name, asked, refuses

    def refuse(self, x):
        self.asked.append(self.name)
        if reason := self.refuses(x.flatten()[0].item()):
            raise Refusal(reason)

    def launches(self):
        return {"silu_mul": lambda x, gate, out: (self.name, x[0, 0].item())}


@pytest.fixture
def team(monkeypatch):
    """Replace the backends of a CPU: `native` runs positive numbers, `reference` even ones."""
    asked = []
    first = Backend("native", asked, lambda x: f"x is {x:g}" if x <= 0 else "")
    second = Backend("reference", asked, lambda x: "x is odd" if x % 2 else "")
    monkeypatch.setattr(modules, "_loaded", {"native": first, "reference": second})
    return asked


def run(number):
    return kernels.silu_mul(X * number, X)


def test_the_first_backend_that_accepts_a_call_runs_it(team):
    assert run(3) == ("native", 3)
    assert team == ["native"]
    assert run(-2) == ("reference", -2)
    assert team == ["native", "native", "reference"]


def test_a_kernel_of_a_gate_is_never_the_reference(team):
    assert kernels.silu_mul_by_kernel(3 * X, X) == ("native", 3)
    assert kernels.silu_mul_by_kernel(-2 * X, X) is None
    assert team == ["native", "native"]
    leaf = X.clone().requires_grad_()
    assert kernels.silu_mul_by_kernel(leaf, X) is None


def test_the_error_lists_every_reason_in_one_line(team):
    with pytest.raises(BackendError) as caught:
        run(-1)
    reasons = "native: x is -1; reference: x is odd"
    assert str(caught.value) == f"no backend runs this silu_mul ({reasons})"
    assert isinstance(caught.value, ValueError)
    with (
        use_backend("native"),
        pytest.raises(BackendError, match="native: the backend has no such"),
    ):
        kernels.attention(X[None], X[None], X[None])


def test_a_chosen_backend_never_falls_back_and_the_choice_ends_with_its_block(team):
    with use_backend("native"), pytest.raises(BackendError, match="native: x is -2"):
        run(-2)
    with use_backend("reference"):
        assert run(2) == ("reference", 2)
    assert team == ["native", "reference"]
    with use_backend("reference"):
        with pytest.raises(BackendError, match="native: x is -2"), use_backend("native"):
            run(-2)
        assert run(2) == ("reference", 2)
    assert run(2) == ("native", 2)
    assert forced() is None


def sees(**fallback):
    return seeing(
        Snapshot(0, 0, native=fallback.pop("native", True), fallback=Fallback(**fallback))
    )


def test_a_video_runs_the_kernels_that_it_sees(team):
    with sees():
        assert run(2) == ("native", 2)
    for what in ({"native": False}, {"reference": True}):
        with sees(**what):
            assert run(2) == ("reference", 2)
    with sees(sliced=True, contiguous=True):  # of convolutions
        assert run(2) == ("native", 2)


def route_of(*taps, stride=(1, 1, 1)):
    weight = ConvWeight.of(random(8, 8, *taps))
    route = conv_route(weight, stride, video=True)
    return [tuple(each.kernel) for each in route.candidates], route.joined


@pytest.mark.parametrize(
    ("taps", "stride", "joined"),
    [
        ((3, 3, 3), (1, 1, 1), True), ((1, 3, 3), (1, 1, 1), False), ((3, 1, 1), (2, 1, 1), True),
        ((2, 1, 1), (2, 1, 1), False), ((3, 3), (1, 1, 1), False),
    ],
)  # fmt: skip
def test_a_convolution_that_needs_earlier_frames_has_them_joined(taps, stride, joined):
    assert route_of(*taps, stride=stride) == ([("aten", 0), ("reference", 0)], joined)


def test_the_candidates_of_a_convolution_replace_what_is_wrong():
    for what, of_videos, of_frames in (
        ({"sliced": True}, ("sliced", 0), ("aten", 0)),
        ({"reference": True}, ("reference", 0), ("reference", 0)),
        ({"contiguous": True}, ("reference", 1), ("reference", 1)),
        ({"sliced": True, "contiguous": True}, ("sliced", 1), ("reference", 1)),
    ):
        with sees(**what):
            assert route_of(3, 3, 3)[0] == [of_videos]
            assert route_of(3, 3)[0] == [of_frames]
    with sees(float32=True), use_backend("sliced"):
        assert route_of(3, 3, 3)[0] == [("sliced", 0)]
    assert convolution_order("apple", 3) == ("sliced", "aten", "reference")
    assert convolution_order("apple", 2) == convolution_order("cpu", 3) == ("aten", "reference")


@pytest.mark.parametrize(
    ("backend", "op", "dtype"),
    [case for case in product(ORDER, OPS, (*DTYPES, torch.float64)) if case not in SERVED],
    indirect=["backend"],
)
def test_a_backend_refuses_ops_and_dtypes_that_it_lacks(backend, op, dtype):
    args, keywords = inputs(op, dtype)
    with pytest.raises(BackendError, match=f"no backend runs this {op} \\({backend}: .+\\)$"):
        getattr(kernels, op)(*args, **keywords)


@pytest.mark.parametrize("op", [*OPS, "conv3d"])
def test_a_tensor_that_requires_a_gradient_is_refused(op):
    convolution = (video(1, 8, 3, 4, 4), random(8, 8, 1, 1, 1)), {}
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
