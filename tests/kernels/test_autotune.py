"""The trial of backends on a device: incorrect ones are excluded, and the fastest comes first."""

import logging
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import (
    autotune,
    backends,
    dispatch,
    errors,
    measure,
    reference,
    sample_inputs,
    use_backend,
)
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels.cases import DTYPES, OPS, inputs, random, video

CPU = torch.device("cpu")


@pytest.fixture
def team(monkeypatch):
    """Replace the backends by the reference and two copies of it, `early` and `late`.

    `times` holds the seconds that each takes; a function in `does` replaces the ops of a copy.
    """
    times = {"early": 3.0, "late": 2.0, "reference": 1.0}
    does, asked = {}, []

    def stand_in(name):
        def op(function):
            def run(*args, **kwargs):
                asked.append(name)
                return does.get(name, function)(*args, **kwargs)

            return run

        return SimpleNamespace(**{name: op(getattr(reference, name)) for name in OPS})

    order = ("early", "late", "reference")
    for module in (backends, dispatch, autotune):
        monkeypatch.setattr(module, "ORDER", order)
    monkeypatch.setattr(
        dispatch,
        "_loaded",
        {"early": stand_in("early"), "late": stand_in("late"), "reference": reference},
    )
    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setattr(autotune, "_orders", {})
    monkeypatch.setattr(
        measure, "seconds", lambda calls, *_, **__: {name: times[name] for name in calls}
    )
    return SimpleNamespace(times=times, does=does, asked=asked)


class OnGPU(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


def order(op="silu_mul", x=None, *others, **kwargs):
    x = torch.ones(4, 16) if x is None else x
    return autotune.order(dispatch.ask, op, (x, *(others or (x,))), kwargs)


def test_the_fastest_comes_first(team):
    assert order() == ("reference", "late", "early")
    team.times.update(early=0.5)
    assert order() == ("reference", "late", "early")  # measured once
    autotune._orders.clear()
    assert order() == ("early", "reference", "late")


def test_an_incorrect_backend_is_excluded_and_logged_once(team, caplog):
    team.does["early"] = lambda x, gate: reference.silu_mul(x, gate) + 0.1
    with caplog.at_level(logging.WARNING):
        assert order() == ("reference", "late")
        assert order(x=torch.ones(4, 8)) == ("reference", "late")
    (line,) = (record.getMessage() for record in caplog.records)
    assert "early computes silu_mul incorrectly on cpu" in line


def test_a_backend_with_an_incorrect_tail_is_excluded(team):
    def forgets(x, gamma, *, tail, **options):
        return reference.rms_norm_silu(x, gamma, tail=tail.clone(), **options)

    team.does["early"] = forgets
    x, tail = video(1, 16, 2, 4, 4), video(1, 16, 2, 4, 4, seed=1)
    before = tail.clone()
    kwargs = {"silu": True, "bias": None, "tail": tail, "out": None}
    assert autotune.order(dispatch.ask, "rms_norm_silu", (x, random(16)), kwargs) == (
        "reference",
        "late",
    )
    assert torch.equal(tail, before)  # trials do not touch the tensors of the caller


def test_refusals_and_nan_exclude_a_backend(team):
    def refuses(*_, **__):
        raise Refusal("no")

    team.does.update(early=refuses, late=lambda x, gate: x * float("nan") + gate)
    assert order() == ("reference",)


def test_a_trial_does_not_force_a_backend(team):
    """A backend that the user has disabled stays disabled in a trial."""

    def refuses_unless_chosen(x, gate):
        if backends.forced() is None:
            raise Refusal("it is disabled")
        return reference.silu_mul(x, gate)

    team.does["early"] = refuses_unless_chosen
    assert order() == ("reference", "late")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounding_error_is_accepted(team, dtype):
    team.does["early"] = lambda x, gate: (
        reference.silu_mul(x, gate) * (1 + torch.finfo(dtype).eps)
    ).to(dtype)
    x = torch.ones(4, 16, dtype=dtype)
    assert "early" in order("silu_mul", x)


def test_each_kind_of_call_has_one_trial_for_nearby_sizes(team):
    order(x=torch.ones(4, 16))
    tries = len(team.asked)
    order(x=torch.ones(400, 16))
    assert len(team.asked) == tries
    for x in (torch.ones(4, 32), torch.ones(4, 16).half(), torch.ones(1 << 18, 16)):
        before = len(team.asked)
        order(x=x)
        assert len(team.asked) > before


def test_a_trial_without_memory_uses_the_reference_once(team):
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    team.does["early"] = full
    assert order() == ("reference",)
    del team.does["early"]
    assert set(order()) == {"early", "reference", "late"}


def test_a_trial_ignores_inference_mode_of_the_caller(team):
    def checks(x, gate):
        assert not torch.is_inference_mode_enabled()
        return reference.silu_mul(x, gate)

    team.does["early"] = checks
    team.times["early"] = 0.1
    with torch.inference_mode():
        assert order() == ("early", "reference", "late")


def test_no_trial_runs_during_graph_capture(team, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = torch.ones(4, 16).as_subclass(OnGPU)
    assert autotune.order(dispatch.ask, "silu_mul", (x, x), {}) == ("reference",)
    assert not team.asked
    assert not autotune._orders


def test_calls_on_a_gpu_follow_the_trial(team, monkeypatch):
    x = torch.ones(4, 16).as_subclass(OnGPU)
    monkeypatch.setattr(autotune, "order", lambda *_: ("late", "reference"))
    dispatch.run("silu_mul", x, x)
    assert team.asked == ["late"]
    with use_backend("early"):
        dispatch.run("silu_mul", x, x)
    assert team.asked == ["late", "early"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_a_sample_call_matches_the_given_call_except_size(op, dtype):
    args, kwargs = inputs(op, dtype)
    given = sample_inputs.names(getattr(reference, op), args, kwargs)
    made = sample_inputs.call(op, (4, 7, 9), dtype, CPU, given)
    assert getattr(kernels, op)(**made) is not None
    for name, value in made.items():
        wanted = given.get(name)
        if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor):
            channels = 1 if value.ndim == 5 else -1
            assert (value.ndim == 5) == (wanted.ndim == 5), name
            assert value.shape[channels] == wanted.shape[channels], name
        elif name in given:
            assert value == wanted, name


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_sample_call_has_statistics_if_the_given_has(dtype):
    args, kwargs = inputs("group_norm_silu", dtype)
    for statistics in (None, kernels.group_norm_statistics(args[0], 4)):
        given = sample_inputs.names(
            reference.group_norm_silu, args, kwargs | {"statistics": statistics}
        )
        made = sample_inputs.call("group_norm_silu", (4, 7, 9), dtype, CPU, given)
        assert (made["statistics"] is None) == (statistics is None)
        assert kernels.group_norm_silu(**made).isfinite().all()
    assert "statistics" not in sample_inputs.call("group_norm_silu", (4, 7, 9), dtype, CPU)


@pytest.mark.parametrize("op", OPS)
def test_sample_calls_repeat_and_keep_the_global_generator(op):
    state = torch.get_rng_state()
    first, second = (sample_inputs.call(op, (2, 4, 6), torch.bfloat16, CPU) for _ in range(2))
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else None
        assert same or value == second[name]
    assert torch.equal(torch.get_rng_state(), state)


def test_moved_bytes_count_each_tensor_once():
    x = random(10, 96, dtype=torch.bfloat16)
    arguments = {"x": x, "gate": x, "out": None}
    assert sample_inputs.moved_bytes(arguments, x) == 3 * 10 * 96 * 2
    arguments = sample_inputs.call("rms_norm_silu", (2, 4, 4), torch.bfloat16, CPU)
    y = kernels.rms_norm_silu(**arguments)
    pixels = 2 * 16 + 2 * 16 + 4 * 16 + 2 * 16  # in, tail in, out, tail out
    assert sample_inputs.moved_bytes(arguments, y) == pixels * 96 * 2 + 2 * 96 * 4


def test_seconds_are_per_call_after_a_warm_up():
    calls = []
    times = measure.seconds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, launches=True
    )
    assert set(times) == {"a", "b"}
    assert all(0 < value < 0.01 for value in times.values())
    assert calls[:2] == ["a", "b"]
    assert calls.count("a") == calls.count("b") == 1 + measure._ROUNDS * measure._CALLS
