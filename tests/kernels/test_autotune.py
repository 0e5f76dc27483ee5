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
    monkeypatch.setattr(autotune, "_ELEMENTS", (1 << 14, 1 << 10))
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


def trials(team, op, *calls):
    """Return the number of trials that `calls` of `op` start, of arguments and keywords each."""
    start = len(autotune._orders)
    for args, kwargs in calls:
        team.asked.clear()
        known = len(autotune._orders)
        autotune.order(dispatch.ask, op, args, kwargs)
        assert bool(team.asked) == (len(autotune._orders) > known)
    return len(autotune._orders) - start


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_trial(team, caplog, op, dtype):
    args, kwargs = inputs(op, dtype)
    with caplog.at_level(logging.WARNING):
        found = autotune.order(dispatch.ask, op, args, kwargs)
    assert found == ("reference", "late", "early")
    assert not caplog.messages


def test_one_trial_serves_all_sizes_of_a_width_and_dtype(team):
    sizes = [torch.ones(count, 16) for count in (4, 400, 1 << 18)]
    assert trials(team, "silu_mul", *(((x, x), {}) for x in sizes)) == 1
    others = torch.ones(4, 32), torch.ones(4, 16).half()
    assert trials(team, "silu_mul", *(((x, x), {}) for x in others)) == 2


def test_one_trial_serves_videos_of_all_lengths(team):
    def call(frames, dtype=torch.float32):
        out = torch.empty(1, frames, 16, 16, 3, dtype=dtype)
        return (video(1, 3, frames, 16, 16),), {"out": out}

    assert trials(team, "frames_to_images", *map(call, (1, 4, 8))) == 1
    for dtype in (torch.uint8, torch.uint16):
        assert trials(team, "frames_to_images", call(1, dtype), call(4, dtype)) == 1


def test_one_trial_serves_calls_with_and_without_optional_tensors(team):
    x, numbers, tail = video(1, 16, 2, 4, 4), random(16), video(1, 16, 2, 4, 4)
    out = torch.empty_like(x)
    norms = [{}, {"bias": numbers}, {"tail": tail}, {"bias": numbers, "tail": tail}, {"out": out}]
    assert trials(team, "rms_norm_silu", *(((x, numbers), given) for given in norms)) == 1
    sums = [(x, numbers), (x, None, x), (x, numbers, x, numbers)]
    assert trials(team, "bias_residual", *((args, {}) for args in sums)) == 1
    assert trials(team, "rms_norm_silu", ((x, numbers), {"silu": False})) == 1
    assert trials(team, "rms_norm_silu", ((x, numbers.half()), {})) == 1


@pytest.mark.parametrize("given", [(), ("tail",)])
def test_a_trial_checks_optional_tensors_that_the_first_call_lacks(team, given):
    def wrong_with_bias(x, gamma, *, bias, **options):
        y = reference.rms_norm_silu(x, gamma, bias=bias, **options)
        return y if bias is None else y.add_(0.1)

    def wrong_without_bias(x, gamma, *, bias=None, **options):
        y = reference.rms_norm_silu(x, gamma, bias=bias, **options)
        return y.add_(0.1) if bias is None else y

    team.does.update(early=wrong_with_bias, late=wrong_without_bias)
    x, tail = video(1, 16, 2, 4, 4), video(1, 16, 2, 4, 4)
    kwargs = {"bias": None} | ({"tail": tail} if given else {})
    found = autotune.order(dispatch.ask, "rms_norm_silu", (x, random(16)), kwargs)
    assert found == ("reference",)


def coded(channels, result=None, **options):
    """Return the options of a norm that writes codes."""
    given = {"codes": torch.ones(channels), "saturated": torch.zeros(2, dtype=torch.int64)}
    out = None if result is None else video(1, channels, 2, 4, 4).to(result)
    return {"silu": True, "bias": None, "tail": None, "out": out, "border": 0, **given, **options}


def test_calls_with_codes_have_a_trial_of_their_own(team):
    """A backend with wrong codes, or one with wrong counts, serves only calls without them."""

    def moves(x, gamma, **options):
        y = reference.rms_norm_silu(x, gamma, **options)
        return y if options.get("codes") is None else y.bitwise_xor_(4)

    def forgets(x, gamma, **options):
        if options.get("codes") is not None:
            options["saturated"] = torch.zeros_like(options["saturated"])
        return reference.rms_norm_silu(x, gamma, **options)

    team.does.update(early=moves, late=forgets)
    args, all_three = (video(1, 16, 2, 4, 4), random(16)), ("reference", "late", "early")
    plain = {"silu": True, "bias": None, "tail": None, "out": None, "border": 0}
    counts = coded(16)
    for options, expected in (
        (plain, all_three),
        (counts, ("reference",)),
        (coded(16, border=1), ("reference",)),
        (plain, all_three),
    ):
        assert autotune.order(dispatch.ask, "rms_norm_silu", args, options) == expected
    assert len(autotune._orders) == 3
    assert not counts["saturated"].any()  # trials do not touch the tensors of the caller


def test_one_trial_serves_codes_of_one_dtype(team):
    args = video(1, 16, 2, 4, 4), random(16)
    tail = video(1, 16, 2, 4, 4).to(torch.uint8)
    calls = [coded(16), coded(16, torch.uint8), coded(16, tail=tail), coded(16, bias=args[1])]
    assert trials(team, "rms_norm_silu", *((args, given) for given in calls)) == 1
    assert trials(team, "rms_norm_silu", (args, coded(16, torch.int8))) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["rms_norm_silu", "group_norm_silu"])
@pytest.mark.parametrize("result", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize("border", [0, 1])
def test_most_values_of_a_sample_call_have_a_code(op, dtype, result, border):
    args, kwargs = inputs(op, dtype)
    kwargs |= coded(24, result) | {"border": border}
    if op == "group_norm_silu":
        del kwargs["bias"]
    given = sample_inputs.names(getattr(reference, op), args, kwargs)
    made = sample_inputs.call(op, (4, 33, 31), dtype, CPU, given)
    assert made["out"].dtype == (result or torch.uint8)
    again = sample_inputs.call(op, (4, 33, 31), dtype, CPU, given)
    getattr(reference, op)(**made)
    outside, missing = made["saturated"].tolist()
    assert 0 < outside < made["x"].numel() / 16
    assert missing == 0
    assert not again["saturated"].any()
    assert len(made["out"].unique()) > 100


def lacks_memory(*_, **__):
    # The driver's words, without an exception type of their own.
    raise RuntimeError("CUDA driver error: out of memory")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("out of memory")])
def test_a_trial_without_memory_uses_the_reference_once(team, error, caplog):
    def full(*_, **__):
        raise error

    team.does["early"] = full
    with caplog.at_level(logging.WARNING):
        assert order() == ("reference",)
    assert not caplog.messages
    del team.does["early"]
    assert set(order()) == {"early", "reference", "late"}


def test_a_trial_needs_little_memory_if_memory_is_short(team):
    def limited(x, gate):
        return lacks_memory() if x.numel() > 1 << 12 else reference.silu_mul(x, gate)

    team.does["early"] = limited
    team.times["early"] = 0.1
    assert order() == ("early", "reference", "late")


def test_a_backend_that_fails_is_excluded_and_logged_once(team, caplog):
    def fails(*_, **__):
        raise TypeError("no such symbol\nand a long story")

    team.does["early"] = fails
    with caplog.at_level(logging.WARNING):
        assert order() == ("reference", "late")
        assert order(x=torch.ones(4, 8)) == ("reference", "late")
    (line,) = caplog.messages
    assert "early silu_mul failed on cpu (TypeError: no such symbol)" in line


def test_a_trial_that_fails_leaves_the_reference(team, caplog, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("CUDA error: launch failed")

    monkeypatch.setattr(measure, "seconds", fails)
    with caplog.at_level(logging.WARNING):
        assert order() == ("reference",)
        assert order(x=torch.ones(4, 8)) == ("reference",)
    (line,) = caplog.messages
    assert "the trial of silu_mul failed on cpu (RuntimeError: CUDA error: launch failed)" in line


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
            assert value.dtype == wanted.dtype, name
            assert value.shape[channels] == wanted.shape[channels], name
        elif name in given:
            assert value == wanted, name


@pytest.mark.parametrize("order", [torch.channels_last_3d, torch.contiguous_format])
def test_a_sample_result_has_dtype_and_layout_of_the_given(order):
    out = torch.empty(1, 3, 2, 8, 8, dtype=torch.float16).contiguous(memory_format=order)
    given = {"x": video(1, 12, 2, 4, 4), "size": (1, 2, 2), "order": "cthw", "out": out}
    made = sample_inputs.call("pixel_shuffle_3d", (4, 6, 10), torch.float32, CPU, given)["out"]
    assert (made.shape, made.dtype) == ((1, 3, 4, 12, 20), torch.float16)
    assert made.is_contiguous(memory_format=order)


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
