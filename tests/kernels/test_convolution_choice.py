"""The choice of a convolution's candidate: right and precise ones only, the fastest, tried once."""

import logging
import threading
import weakref

import pytest
import torch

from fast_video_vae.kernels import Fused, cache, dispatch, measure, preparations, trials
from fast_video_vae.kernels.convolution import budget, choice, sample, store
from fast_video_vae.kernels.convolution.trial import is_precise_enough
from fast_video_vae.kernels.convolution.weight import ConvWeight, channels_last
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.tests.kernels.candidates import (
    PADDED,
    PLAIN,
    call,
    failing,
    new_team,
    order,
    tried,
)
from fast_video_vae.tests.kernels.cases import random, video

CPU = torch.device("cpu")


@pytest.fixture
def team(monkeypatch, tmp_path):
    return new_team(monkeypatch, tmp_path)


def test_the_fastest_serves_with_the_plain_op_and_the_reference_after_it(team):
    assert tried(team) == ("triton:1", *PLAIN)
    team.restart()
    team.times.update({"kitchen": 0.5})
    assert tried(team, channels=24) == ("kitchen", *PLAIN)


def test_a_candidate_must_be_two_percent_faster(team):
    team.variants = 0
    team.times.update(kitchen=3.93)
    assert tried(team) == PLAIN
    team.times.update(kitchen=3.91)
    assert tried(team, channels=24) == ("kitchen", *PLAIN)


def test_a_wrong_candidate_loses_a_shape_class_with_one_line(team, caplog):
    def wrong(y):
        y[..., -1, -1] += 0.3
        return y

    team.does["triton:1"] = team.does["triton:0"] = wrong
    with caplog.at_level(logging.WARNING):
        assert tried(team) == ("kitchen", *PLAIN)
        assert tried(team, channels=24) == ("kitchen", *PLAIN)
    (line,) = caplog.messages
    assert "triton computes conv3d incorrectly on cpu" in line
    team.does.clear()
    assert tried(team, channels=32) == ("triton:1", *PLAIN)


@pytest.mark.parametrize(
    "change",
    [lambda y: y.fill_(float("nan")), lambda y: y[..., :-1, :], lambda y: y.zero_()],
    ids=["nan", "another shape", "zeros"],
)
def test_other_results_are_found(team, change):
    team.does["triton:1"] = change
    assert tried(team) == ("triton:0", *PLAIN)


def test_a_candidate_that_raises_is_left_out_with_one_line(team, caplog):
    team.does["triton:1"] = failing(TypeError("no such symbol\nand a long story"))
    with caplog.at_level(logging.WARNING):
        assert tried(team) == ("triton:0", *PLAIN)
        assert tried(team, channels=24) == ("triton:0", *PLAIN)
    (line,) = caplog.messages
    assert "triton conv3d failed on cpu (TypeError: no such symbol)" in line


def test_a_refusal_is_left_out_without_a_line(team, caplog):
    team.does["triton:1"] = failing(Refusal("it has no such width"))
    with caplog.at_level(logging.WARNING):
        assert tried(team) == ("triton:0", *PLAIN)
    assert not caplog.messages


def test_memory_that_holds_the_right_result_does_not_make_a_candidate_right(team, monkeypatch):
    def seconds(calls, *_, **__):
        for run in calls.values():
            run()
        return {name: team.times[name] for name in calls}

    def ask(name, op, *args, **kwargs):
        if name == "triton:1" and op == "conv3d":
            return kwargs["out"]  # which it never writes
        return team.ask(name, op, *args, **kwargs)

    monkeypatch.setattr(measure, "seconds", seconds)
    team.fused["triton:1"] = Fused(sums=True)
    with trials():
        args, kwargs = call(out=channels_last(torch.empty(1, 16, 2, 6, 7, dtype=torch.bfloat16)))
        assert choice.order(ask, "conv3d", args, kwargs) == ("triton:0", *PLAIN)


@pytest.mark.parametrize("broken", ["residual", "residual_bias", "tail", "in place"])
def test_the_fastest_is_right_with_the_terms_that_a_question_lacks(team, broken):
    """The first call of a class is a question, whose answer is for calls with a residual too."""

    def ask(name, op, *args, **kwargs):
        y = team.ask(name, op, *args, **kwargs)
        given = kwargs.get("out") if broken == "in place" else kwargs.get(broken)
        if name == "triton:1" and op == "conv3d" and given is not None:
            y += 1
        return y

    args, _ = call()
    team.fused["triton:1"] = Fused(tail=True, sums=True)
    with trials():
        assert choice.order(ask, "conv3d", args[:2], PADDED) == ("triton:0", *PLAIN)
        # No call with a norm has a residual.
        assert choice.order(ask, "conv3d", args[:2], PADDED | {"gamma": True})[0] == "triton:1"


def test_a_trial_does_not_use_the_autocast_of_the_caller(team):
    seen = set()

    def ask(name, op, *args, **kwargs):
        if op == "conv3d":
            seen.add(torch.is_autocast_enabled("cpu"))
        return team.ask(name, op, *args, **kwargs)

    with trials(), torch.autocast("cpu", torch.bfloat16):
        assert choice.order(ask, "conv3d", *call(dtype=torch.float16))[0] == "triton:1"
    assert seen == {False}


def test_a_larger_trial_is_freed_before_a_smaller_one(team, monkeypatch):
    alive = []
    like = sample.like

    def watched(*args):
        made = like(*args)
        alive.append(weakref.ref(made.x))
        assert sum(each() is not None for each in alive) == 1
        return made

    def full(y):
        team.layouts.clear()
        raise torch.OutOfMemoryError("full")  # a new one, which holds this trial only

    monkeypatch.setattr(sample, "like", watched)
    team.does["kitchen"] = full
    assert tried(team) == PLAIN
    assert len(alive) == len(sample.SIZES)


def test_missing_variants_and_modules_leave_the_others(team, monkeypatch, caplog):
    def ask(name, op, *args, **kwargs):
        if name.startswith("triton"):
            raise ModuleNotFoundError("no module named triton")
        return team.ask(name, op, *args, **kwargs)

    with trials(), caplog.at_level(logging.WARNING):
        assert choice.order(ask, "conv3d", *call()) == ("kitchen", *PLAIN)
    assert not caplog.messages


def test_an_imprecise_candidate_is_left_out(team):
    """The error is below what a wrong kernel makes, and above that of bfloat16."""
    generator = torch.Generator().manual_seed(1)

    def noisy(y):
        noise = torch.empty_like(y, dtype=torch.float32).normal_(generator=generator)
        return (y.float() + 0.003 * y.float().std() * noise).to(y.dtype)

    team.does["triton:1"] = noisy
    assert tried(team) == ("triton:0", *PLAIN)


def test_the_precision_policy_is_the_error_of_bfloat16():
    exact = random(1 << 14).double()
    plain = exact.bfloat16()
    assert is_precise_enough(exact.bfloat16(), plain, exact)
    assert is_precise_enough(exact.half(), plain, exact)
    assert not is_precise_enough((exact * 8).round() / 8, plain, exact)
    assert not is_precise_enough(plain + 1.5 * (plain - exact), plain, exact)
    assert not is_precise_enough(exact * float("nan"), plain, exact)


@pytest.mark.parametrize("given", [{}, {"gamma": 1}, {"residual": 1}, {"tail": 2}, {"stride": 2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_plain_op_is_precise_enough_by_its_own_policy(team, given, dtype):
    """So the exact numbers of a trial are those of the op, with all its terms."""
    options = {}
    if "gamma" in given:
        options["gamma"] = random(16)
    if "residual" in given:
        options["residual"] = video(1, 16, 2, 6, 7).to(dtype)
    if "tail" in given:
        options["tail"] = video(1, 16, 2, 6, 7).to(dtype)
    if "stride" in given:
        options["stride"] = (2, 2, 2)
    assert tried(team, dtype=dtype, **options) == ("triton:1", *PLAIN)


def test_candidates_of_this_machine_go_through_a_trial(team, monkeypatch):
    """Those for a GPU refuse; the slices are as precise as the plain op."""
    residual = video(1, 32, 2, 12, 12).bfloat16()
    args, kwargs = call(channels=32, size=(12, 12), residual=residual)
    team.times.update(sliced=1.0)
    with trials():
        assert choice.order(dispatch.ask, "conv3d", args, kwargs) == ("sliced", *PLAIN)
    served = store.opened(CPU).times("conv3d bfloat16 32x32x3x3x3 1x1x1 4^3 frames")
    assert served.pop("aten") == 4.0
    assert served.pop("sliced") == 1.0
    assert set(served.values()) == {None}


def test_frames_have_trials_too(team):
    x = random(2, 16, 20, 21).bfloat16().contiguous(memory_format=torch.channels_last)
    weight = ConvWeight.of(random(16, 16, 3, 3).bfloat16())
    kwargs = {"stride": (2, 2), "padding": (1, 1), "out": None, "gamma": random(16)}
    with trials():
        assert choice.order(team.ask, "conv2d", (x, weight), kwargs) == ("triton:1", *PLAIN)
    assert "sliced" not in team.asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_have_no_trial(team, dtype):
    assert tried(team, dtype=dtype) == PLAIN
    assert not team.asked


def test_no_trial_runs_outside_of_a_block(team):
    assert order(team) == PLAIN
    assert not team.asked
    assert tried(team) == ("triton:1", *PLAIN)
    assert order(team) == ("triton:1", *PLAIN)


def test_the_first_class_does_not_take_the_whole_budget(team):
    """The most promising candidates of several classes come before all of one."""
    team.costs.update(
        {"triton:0": 0.35, "triton:1": 0.35}
    )  # twice, without a residual and with one
    with trials():
        assert order(team) == ("triton:0", *PLAIN)
        assert order(team, channels=24) == ("triton:0", *PLAIN)
        assert order(team, channels=32) == ("triton:0", *PLAIN)
        team.asked.clear()
        assert order(team, channels=40) == PLAIN
    assert not team.asked


def test_a_cut_trial_continues_later_with_what_is_left(team):
    team.costs.update({"kitchen": 5.0, "triton:0": 5.0, "triton:1": 5.0})
    found = []
    for _ in range(4):
        team.asked.clear()
        found.append((tried(team)[0], list(dict.fromkeys(team.asked))))
        team.restart()  # in another process too
    assert found == [
        ("kitchen", ["aten", "kitchen"]),
        ("triton:0", ["aten", "triton:0"]),
        ("triton:1", ["aten", "sliced", "triton:1"]),
        ("triton:1", []),
    ]


def test_choices_are_frozen_in_a_block(team):
    team.costs["kitchen"] = 5.0
    with trials():
        assert order(team) == ("kitchen", *PLAIN)
        assert order(team, channels=24) == PLAIN
        other = threading.Thread(target=lambda: (tried(team), tried(team, channels=24)))
        other.start()
        other.join()
        assert order(team) == ("kitchen", *PLAIN)
        assert order(team, channels=24) == PLAIN
    assert tried(team) == ("triton:1", *PLAIN)


def test_blocks_join_the_outer_one(team):
    team.costs["kitchen"] = 5.0
    with trials():
        assert tried(team) == ("kitchen", *PLAIN)
        assert tried(team, channels=24) == PLAIN


def test_the_blocks_of_one_work_share_time_and_choices(team, caplog):
    team.costs["kitchen"] = 5.0
    work = budget.TrialBudget()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with trials(work):
                assert order(team) == ("kitchen", *PLAIN)
                assert order(team, channels=24) == PLAIN
            assert budget.current() is None
        assert not caplog.messages
        work.close()
    (line,) = caplog.messages
    assert "timed the convolutions" in line
    with trials(work):  # it is over
        assert budget.current() is None


def test_a_generator_that_ends_elsewhere_leaves_no_block_open(team):
    def stream():
        with trials():
            yield order(team)

    pieces = stream()
    assert next(pieces) == ("triton:1", *PLAIN)
    closer = threading.Thread(target=pieces.close)
    closer.start()
    closer.join()
    assert budget.current() is None
    assert order(team, channels=24) == PLAIN


def test_a_block_with_trials_logs_one_line_and_its_time(team, caplog):
    before = len(preparations())
    with caplog.at_level(logging.INFO):
        tried(team)
        tried(team)
    (line,) = caplog.messages
    assert "timed the convolutions of 1 shapes" in line
    (done,) = preparations()[before:]
    assert (done.kind, done.label) == ("kernel build", "convolution trials")


def test_the_size_of_the_result_and_the_norm_decide_the_class(team):
    def new(**options):
        team.asked.clear()
        tried(team, **options)
        return bool(team.asked)

    assert new()
    assert not new(tail=video(1, 16, 2, 6, 7).bfloat16(), frames=3)
    assert not new(residual=video(1, 16, 2, 6, 7).bfloat16())
    assert not new(frames=5)
    assert not new(size=(8, 9), padding=(0, 0))  # the same frames with a border
    assert new(frames=3)  # one frame of the result
    assert not new(size=(7, 9))
    assert new(size=(6, 11))
    assert new(gamma=random(16))
    assert new(stride=(1, 2, 2))
    assert new(dtype=torch.float16)
    assert new(taps=(1, 3, 3))


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_question_for_the_layout_and_the_call_get_one_answer(team, frames):
    """The layout is asked with the new frames alone."""
    args, kwargs = call(frames=frames, tail=video(1, 16, 2, 6, 7).bfloat16())
    with trials():
        first = choice.order(team.ask, "conv3d", args[:2], PADDED | {"gamma": None})
        assert first == ("triton:1", *PLAIN)
        team.asked.clear()
        assert choice.order(team.ask, "conv3d", args, kwargs) == first
    assert not team.asked


def test_a_question_about_a_norm_is_the_class_of_calls_with_one(team):
    args, kwargs = call(gamma=random(16))
    with trials():
        choice.order(team.ask, "conv3d", args[:2], PADDED | {"gamma": True})
        team.asked.clear()
        choice.order(team.ask, "conv3d", args, kwargs)
    assert not team.asked


def test_every_candidate_gets_its_own_layout(team):
    team.fused.update({"kitchen": Fused(sums=True, border=True), "triton:0": Fused(tail=True)})
    tail = video(1, 16, 2, 6, 7).bfloat16()
    assert tried(team, tail=tail) == ("triton:1", *PLAIN)
    seen = {}
    for name, (x, kwargs) in team.layouts.items():
        behind = kwargs.get("tail")
        frames = None if behind is None else behind.shape[2]
        seen[name] = (x.shape[2], tuple(x.shape[3:]), frames, kwargs["padding"])
    assert seen["kitchen"] == (6, (8, 9), None, (0, 0))
    assert seen["triton:0"] == (4, (6, 7), 2, (1, 1))
    assert seen["triton:1"] == (6, (6, 7), None, (1, 1))
    assert not torch.any(team.layouts["kitchen"][0][..., 0, :])


def test_a_trial_runs_on_strides_of_the_call(team):
    longer = video(2, 16, 9, 6, 7).bfloat16().contiguous(memory_format=torch.channels_last_3d)
    x = longer[:, :, 2:6]
    args, kwargs = call(out=longer[:, :, 7:])
    team.fused["kitchen"] = Fused(tail=True, sums=True)
    with trials():
        choice.order(team.ask, "conv3d", (x, *args[1:]), kwargs)
    seen, options = team.layouts["kitchen"]
    assert seen.stride() == x.stride()
    assert options["out"].stride() == kwargs["out"].stride()


def test_tensors_of_the_caller_are_neither_read_nor_written(team):
    residual = video(1, 16, 2, 6, 7).bfloat16()
    args, kwargs = call(residual=residual, out=residual, tail=video(1, 16, 2, 6, 7).bfloat16())
    args[0].fill_(float("nan"))
    tensors = [args[0], args[2], residual, kwargs["tail"], args[1].plain()]
    before = [each.clone() for each in tensors]
    state = torch.get_rng_state()
    with trials(), torch.inference_mode():
        assert choice.order(team.ask, "conv3d", args, kwargs) == ("triton:1", *PLAIN)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_in_place_is_tried_in_place(team):
    residual = video(1, 16, 2, 6, 7).bfloat16()
    assert tried(team, residual=residual, out=residual) == ("triton:1", *PLAIN)
    _, kwargs = team.layouts["triton:1"]
    assert kwargs["out"] is kwargs["residual"]


def test_samples_repeat():
    args, kwargs = call(residual=video(1, 16, 2, 6, 7).bfloat16())
    first, second = (sample.like("conv3d", args, kwargs, "whole") for _ in range(2))
    for name in ("x", "residual"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(first.weight.plain(), second.weight.plain())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("out of memory")])
def test_without_memory_the_plain_op_serves_and_nothing_is_kept(team, error, caplog):
    team.does["kitchen"] = failing(error)
    with caplog.at_level(logging.WARNING):
        assert tried(team) == PLAIN
    assert not caplog.messages
    team.does.clear()
    team.restart()
    assert tried(team) == ("triton:1", *PLAIN)


@pytest.mark.parametrize("size", [(40, 40), (200, 20)])
def test_a_trial_is_smaller_if_memory_is_short(team, size):
    """One frame of the result, and then a band of its rows."""

    def ask(name, op, *args, **kwargs):
        limit = 16 * 3 * min(size[0], 64) * size[1]
        if op == "conv3d" and args[0].numel() > limit:
            raise RuntimeError("CUDA error: out of memory")
        return team.ask(name, op, *args, **kwargs)

    with trials():
        assert choice.order(ask, "conv3d", *call(size=size)) == ("triton:1", *PLAIN)
    assert team.layouts["triton:1"][0].shape[3] == min(size[0], 64)


def test_no_trial_starts_if_the_free_memory_is_short(team, monkeypatch):
    monkeypatch.setattr(sample, "fits", lambda *_: False)
    assert tried(team) == PLAIN
    assert not team.asked


def test_no_trial_runs_during_graph_capture(team, monkeypatch):
    monkeypatch.setattr(choice, "is_capturing", lambda device: True)
    assert tried(team) == PLAIN
    assert not choice.fp16_pays(team.ask, CPU)
    assert not team.asked


def test_a_second_process_tries_nothing(team):
    tried(team)
    team.restart()
    team.asked.clear()
    assert tried(team) == order(team) == ("triton:1", *PLAIN)
    assert not team.asked


def test_a_kernel_that_ends_the_process_is_not_tried_again(team):
    class ProcessEnds(BaseException):
        pass

    def ends(y):
        copies.append(next(path.rglob("*.json")).read_text())
        raise ProcessEnds

    path = cache.folder("convolutions")
    copies = []
    team.does["triton:0"] = ends
    with pytest.raises(ProcessEnds):
        tried(team)
    # An interruption by the user does not count: the file has no result again.
    file = next(path.rglob("*.json"))
    assert "triton:0" not in file.read_text()
    file.write_text(copies[0])
    team.restart()
    assert tried(team) == ("triton:1", *PLAIN)
    assert copies == copies[:1]
