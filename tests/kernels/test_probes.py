"""The probe of a device: its grid, its limits, and its results on disk for later processes."""

import itertools
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.kernels import cache
from fast_video_vae.kernels.devices.gpu_config import gpu_config
from fast_video_vae.kernels.probes import environment, measure, probe
from fast_video_vae.kernels.probes.probe import GRID, on_grid
from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.kernels.probe_clock import clock  # noqa: F401

CPU = torch.device("cpu")

# Prints the result, and how often a fresh process measured. The clock is faked, a different one in
# each process, and slow, so that processes that start together all find no result.
FAKED = """
import os, time
from fast_video_vae.kernels.probes import measure
count = 0
def seconds(calls, *_, **__):
    global count
    count += 1
    time.sleep(0.5)
    unit = 1e-3 * (1 + os.getpid() % 97)
    return {key: unit * (1 + os.getpid() % 7 if key[0] == "stream" else 1) for key in calls}
measure.seconds = seconds
"""
ASK = """
import torch
from fast_video_vae.kernels.devices.gpu_config import gpu_config
config = gpu_config(torch.device("cpu"), torch.{dtype})
print(config.products_per_s, config.stream_c)
"""
COUNT = "print(count)\n"


def processes(code, folder, count):
    """Start processes at once and return the lines that each prints."""
    command = script_command(code)
    options = {"env": {**os.environ, "FAST_VIDEO_VAE_CACHE": str(folder)}, "text": True}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        for _ in range(count)
    ]
    results = [process.communicate(timeout=120) for process in started]
    assert not any(process.returncode for process in started), results
    return [out.splitlines() for out, _ in results]


def test_processes_that_share_a_folder_agree_and_only_one_measures(tmp_path):
    code = FAKED + ASK.format(dtype="float32") + COUNT
    together = processes(code, tmp_path, 2)
    (later,) = processes(code, tmp_path, 1)
    assert len({result for result, _ in [*together, later]}) == 1
    assert sorted(int(measured) for _, measured in together) == [0, 2]
    assert later[1] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_without_a_folder_differ_by_one_step_at_most(tmp_path, dtype):
    a_file = tmp_path / "file"
    a_file.touch()
    code = ASK.format(dtype=dtype)
    found = [float(processes(code, a_file, 1)[0][0].split()[1]) for _ in range(5)]
    assert max(found) <= 2 * min(found)


@pytest.mark.parametrize("value", GRID)
def test_noise_around_a_value_of_the_grid_does_not_change_it(value):
    for noise in itertools.product((0.8, 0.9, 1.0, 1.1, 1.2), repeat=3):
        assert on_grid(value * each for each in noise) == value


def test_a_constant_outside_the_grid_becomes_its_end():
    assert (on_grid([1e-6]), on_grid([1e9])) == (GRID[0], GRID[-1]) == (0.25, 64.0)


def test_one_disturbed_layer_does_not_count(clock):  # noqa: F811
    clock.constants = [8.0, 900.0, 8.3]
    assert gpu_config(CPU, torch.float32).stream_c == 8.0


def test_a_slow_cpu_measures_the_first_layer_only(clock):  # noqa: F811
    clock.scale = 10.0
    assert gpu_config(CPU, torch.float32).stream_c == 2.0
    assert clock.asked == [
        [("product", 0), ("stream", 0), ("bypass", 0)],
        [("stream", 0), ("bypass", 0)],
    ]


def test_the_layers_of_a_gpu_are_those_of_the_formula(clock, monkeypatch):  # noqa: F811
    monkeypatch.setattr(probe, "_calls", lambda *_: dict.fromkeys([("product", 0), *WAYS]))
    clock.scale = 100.0  # a GPU measures all layers
    assert probe.measured(torch.device("cuda"), torch.bfloat16).stream_c == 2.0
    assert clock.asked[1] == WAYS


WAYS = [(name, n) for n in range(3) for name in ("stream", "bypass")]


@pytest.mark.parametrize(
    ("rounds", "limit_s", "expected"),
    [
        (5, 100.0, 5),
        (5, 4.5, 3),  # two calls of a second each
        (5, 0.0, 1),
        (1, 100.0, 1),
    ],
)
def test_no_round_begins_after_the_limit(monkeypatch, rounds, limit_s, expected):
    now, counts = [0.0], {"a": 0, "b": 0}

    def call(name):
        now[0] += 1.0
        counts[name] += 1

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {name: lambda name=name: call(name) for name in counts}
    taken = measure.seconds(
        calls, CPU, launches=False, repeats=1, rounds=rounds, limit_s=limit_s
    )  # fmt: skip
    assert taken == {"a": 1.0, "b": 1.0}
    assert counts == {"a": expected + 1, "b": expected + 1}  # and the warm-up


def stored_file(clock):  # noqa: F811
    """Return the file of a result of 2.0, in a new process whose measurement would be 16.0."""
    gpu_config(CPU, torch.float32)
    (path,) = cache.folder("facts").glob("*.json")
    clock.restart()
    clock.constants = [16.0] * 3
    return path


def test_a_later_process_reads_the_result(clock):  # noqa: F811
    stored_file(clock)
    config = gpu_config(CPU, torch.float32)
    assert config.stream_c == 2.0
    assert config.products_per_s > 0
    assert not clock.asked


@pytest.mark.parametrize("part", ["device", "capability", "driver", "torch", "dtype", "processor",
                                  "instructions", "threads"])  # fmt: skip
def test_another_environment_has_a_result_of_its_own(clock, monkeypatch, part):  # noqa: F811
    stored_file(clock)
    of_products = environment.of_products
    assert part in of_products(CPU, torch.float32)
    monkeypatch.setattr(environment, "of_products", lambda *args: of_products(*args) | {part: "9"})
    assert gpu_config(CPU, torch.float32).stream_c == 16.0
    clock.restart()
    monkeypatch.setattr(environment, "of_products", of_products)
    assert gpu_config(CPU, torch.float32).stream_c == 2.0


def test_the_environment_is_text_and_follows_the_threads(monkeypatch):
    found = environment.of_products(CPU, torch.bfloat16)
    assert found["dtype"] == "bfloat16"
    assert found["processor"]
    assert all(type(value) is str for value in found.values())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert environment.of_products(CPU, torch.bfloat16)["threads"] == "77"
