"""The store of the convolutions' times: versions, damage, other processes; and `fp16_pays`."""

import json
import logging
import threading

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import TrialBudget, cache, measure, trials
from fast_video_vae.kernels.convolution import choice, store
from fast_video_vae.kernels.errors import Refusal
from fast_video_vae.kernels.triton_ops import runtime
from fast_video_vae.tests.kernels.candidates import PLAIN, failing, new_team, order, tried

CPU = torch.device("cpu")


@pytest.fixture
def team(monkeypatch, tmp_path):
    return new_team(monkeypatch, tmp_path)


@pytest.mark.parametrize("part", ["torch", "sources", "comfy-kitchen", "driver"])
def test_another_version_has_a_store_of_its_own(team, monkeypatch, part):
    tried(team)
    made_on = store.environment
    monkeypatch.setattr(store, "environment", lambda device: made_on(device) | {part: "99"})
    team.restart()
    assert order(team) == PLAIN
    assert tried(team) == ("triton:1", *PLAIN)


def test_the_environment_names_device_versions_and_switches(monkeypatch):
    monkeypatch.setenv("FAST_VIDEO_VAE_TRITON", "0")
    found = store.environment(CPU)
    assert found["torch"] == torch.__version__
    assert (found["device"], found["FAST_VIDEO_VAE_TRITON"]) == ("cpu", "0")
    assert {"capability", "driver", "cudnn", "triton", "comfy-kitchen"} <= found.keys()
    assert len(found["sources"]) == 32


def stored_file(team):
    tried(team)
    (path,) = cache.folder("convolutions").rglob("*.json")
    team.restart()
    return path


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"format": 1}', "\x00\xff", "[" * 100_000,
        '{"format": 99, "made_on": {}, "shapes": {}, "facts": {}}',
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty_with_one_line(team, caplog, text):
    stored_file(team).write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert order(team) == PLAIN
        assert tried(team) == ("triton:1", *PLAIN)
    assert len(caplog.messages) == 1
    team.restart()
    assert order(team) == ("triton:1", *PLAIN)  # the file was repaired


@pytest.mark.parametrize("name", ["", "tritoo:1", "triton:x", "aten:0", "sliced:3", "kitchen:1"])
def test_unknown_candidates_in_a_file_are_ignored(team, name):
    path = stored_file(team)
    path.write_text(path.read_text().replace('"triton:1"', json.dumps(name)))
    assert order(team) == ("triton:0", *PLAIN)


@pytest.mark.parametrize("switch", ["runs", "fails"])
def test_a_compiler_that_is_installed_later_has_a_store_of_its_own(monkeypatch, switch):
    def require(device):
        if switch == "fails":
            raise Refusal("triton cannot run a kernel")

    monkeypatch.setattr(runtime, "refuse_device", lambda *_: None)
    monkeypatch.setattr(runtime, "require", require)
    assert store.environment(CPU)["triton runs"] == str(switch == "runs")


@pytest.mark.parametrize("length", [1, 100, -2])
def test_a_cut_file_counts_as_empty(team, length):
    path = stored_file(team)
    path.write_text(path.read_text()[:length])
    assert order(team) == PLAIN


@pytest.mark.parametrize("value", ["-1.0", "NaN", "Infinity", '"fast"', "true", "0", "[]", "1e999"])
def test_impossible_times_in_a_file_are_tried_again(team, value):
    path = stored_file(team)
    text = path.read_text().replace('"triton:1": 1.0', f'"triton:1": {value}')
    path.write_text(text)
    assert order(team) == ("triton:0", *PLAIN)
    assert tried(team) == ("triton:1", *PLAIN)


def test_a_folder_that_cannot_be_written_keeps_the_choice_in_memory(team, monkeypatch, caplog):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "mkstemp", denied)
    with caplog.at_level(logging.WARNING):
        assert tried(team) == ("triton:1", *PLAIN)
        assert tried(team, channels=24) == ("triton:1", *PLAIN)
    (line,) = caplog.messages
    assert "not writable (Permission denied)" in line
    assert "FAST_VIDEO_VAE_CACHE" in line
    team.asked.clear()
    assert tried(team) == ("triton:1", *PLAIN)
    assert not team.asked


def test_two_processes_keep_the_results_of_both(team, tmp_path):
    path = tmp_path / "folder" / "times.json"
    first, second = (store.TrialStore(path, {"torch": "2"}) for _ in range(2))
    first.put("a", "aten", 2.0)
    second.put("a", "kitchen", 1.0)
    second.put("b", "aten", 3.0)
    first.put("a", "triton:0", None)
    first.put_fact("fp16_pays", value=True)
    third = store.TrialStore(path, {"torch": "2"})
    assert third.times("a") == {"aten": 2.0, "kitchen": 1.0, "triton:0": None}
    assert third.times("b") == first.times("b") == {"aten": 3.0}
    assert third.fact("fp16_pays") is True
    assert not list(path.parent.glob("*.tmp"))
    second.put("b", "kitchen", 1.0)
    assert store.TrialStore(path, {"torch": "2"}).fact("fp16_pays") is True


def test_a_process_does_not_write_back_what_another_has_replaced(tmp_path, monkeypatch):
    path, replace, others = tmp_path / "times.json", cache.replace, []
    first, second = (store.TrialStore(path, {}) for _ in range(2))
    first.put("a", "kitchen", None)

    def slow(*args):
        # The other process has its time between the reading and the writing of this one.
        monkeypatch.setattr(cache, "replace", replace)
        others.append(threading.Thread(target=first.put, args=("a", "kitchen", 1.0)))
        others[0].start()
        others[0].join(0.2)
        replace(*args)

    monkeypatch.setattr(cache, "replace", slow)
    second.put("b", "aten", 2.0)
    others[0].join()
    third = store.TrialStore(path, {})
    assert (third.times("a"), third.times("b")) == ({"kitchen": 1.0}, {"aten": 2.0})


def test_a_result_that_is_dropped_leaves_the_file(tmp_path):
    path = tmp_path / "times.json"
    kept = store.TrialStore(path, {})
    kept.put("a", "aten", 2.0)
    kept.put("a", "kitchen", None)
    kept.drop("a", "kitchen")
    assert kept.times("a") == store.TrialStore(path, {}).times("a") == {"aten": 2.0}
    assert json.loads(path.read_text())["shapes"] == {"a": {"aten": 2.0}}


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(choice, "_WIDTHS", (8, 16))
    monkeypatch.setattr(choice, "_SIZE", (6, 7))


@pytest.mark.parametrize(("half", "pays"), [(1.0, True), (3.4, True), (3.6, False), (8.0, False)])
def test_float16_pays_if_its_fastest_candidates_are_enough_faster(
    team, narrow, monkeypatch, half, pays
):
    def seconds(calls, *_, **__):
        dtype = next(iter(calls.values())).args[2].dtype
        return dict.fromkeys(calls, half if dtype == torch.float16 else 4.0)

    monkeypatch.setattr(measure, "seconds", seconds)
    assert choice.fp16_pays(team.ask, CPU) is False
    assert not team.asked  # there is no budget
    with trials():
        assert choice.fp16_pays(team.ask, CPU) is pays
    team.asked.clear()
    team.restart()
    assert choice.fp16_pays(team.ask, CPU) is pays
    assert not team.asked  # it is in the store


def test_the_comparison_of_float16_continues_where_time_ran_out(team, narrow):
    team.costs.update({"kitchen": 0.3})  # twice, without a residual and with one
    answers = []
    for _ in range(3):
        with trials(work := TrialBudget()):
            answers.append(choice.fp16_pays(team.ask, CPU))
        answers.append(len(team.asked))
        assert work.left_s > 0.75  # for the shapes of the work
        team.asked.clear()
    kept = store.opened(CPU)
    assert kept.fact("fp16_pays") is False
    assert answers[1] > 0
    assert answers[3] > 0


@pytest.mark.parametrize("halves", [True, False])
def test_tiles_are_compared_where_they_sum_in_float16(team, narrow, halves):
    team.halves = halves
    with trials():
        choice.fp16_pays(team.ask, CPU)
    assert set(team.asked) == {"aten", "kitchen", *(["triton:0"] if halves else [])}


def test_the_comparison_of_float16_checks_what_a_video_runs(team, narrow):
    """Its classes are those of videos too, which have residuals."""

    def ask(name, op, *args, **kwargs):
        y = team.ask(name, op, *args, **kwargs)
        return y + 1 if name == "kitchen" and kwargs.get("residual") is not None else y

    with trials():
        choice.fp16_pays(ask, CPU)
        assert order(team, channels=8)[0] == "triton:1"
    assert store.opened(CPU).times("conv3d bfloat16 8x8x3x3x3 1x1x1 4^2 frames")["kitchen"] is None


def test_a_comparison_that_fails_means_no_and_one_line(team, narrow, caplog):
    team.does["aten"] = failing(TypeError("no such op"))
    with caplog.at_level(logging.WARNING), trials():
        assert choice.fp16_pays(team.ask, CPU) is False
        assert choice.fp16_pays(team.ask, CPU) is False
    (line,) = caplog.messages
    assert "float16 on cpu is unknown (TypeError: no such op)" in line


def test_float16_does_not_pay_without_cuda(team):
    assert kernels.fp16_pays(CPU) is False
    assert kernels.fp16_pays(torch.device("mps")) is False
    assert not team.asked
