"""The probe of a device: its grid, its limits, and its results on disk for later processes."""

import itertools
import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.kernels import cache, measure
from fast_video_vae.kernels.devices.gpu_config import gpu_config
from fast_video_vae.kernels.probes import environment, probe, store
from fast_video_vae.kernels.probes.probe import GRID, Probe, on_grid
from fast_video_vae.tests.builders import script_command
from fast_video_vae.tests.kernels.probe_clock import clock  # noqa: F401

CPU = torch.device("cpu")

# Prints the result, and how often a fresh process measured. The clock is faked, a different one in
# each process, and slow, so that processes that start together all find no result.
FAKED = """
import os, time
from fast_video_vae.kernels import measure
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
    (path,) = cache.folder("probes").glob("*.json")
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


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "3", '"text"', '{"format": 1}', "\x00\xff", "[" * 10_000,
        '{"format": 1, "made_on": {}, "products_per_s": 1e9, "stream_c": 8.0}',
        " " * (1 << 20), "9" * 10_000,
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_absent_and_is_replaced(clock, caplog, text):  # noqa: F811
    stored_file(clock).write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert gpu_config(CPU, torch.float32).stream_c == 16.0
    assert not caplog.messages
    clock.restart()
    assert gpu_config(CPU, torch.float32).stream_c == 16.0
    assert not clock.asked


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ("stream_c", "products_per_s"),
            [
                "-4.0",
                "0.0",
                "NaN",
                "Infinity",
                "1e999",
                '"8.0"',
                "true",
                "8",
                "null",
                "[8.0]",
                "{}",
            ],
        ),
        ("stream_c", "3.0"),  # not on the grid
        ("stream_c", "128.0"),
        ("products_per_s", "1e30"),
        ("format", "2"),
        ("format", '"1"'),
    ],
)
def test_impossible_values_in_a_file_are_measured_again(clock, name, value):  # noqa: F811
    path = stored_file(clock)
    content = json.loads(path.read_text())
    lines = [f'"{k}": {value if k == name else json.dumps(content[k])}' for k in content]
    path.write_text("{" + ", ".join(lines) + "}")
    assert gpu_config(CPU, torch.float32).stream_c == 16.0


@pytest.mark.parametrize("length", [1, 50, -2])
def test_a_cut_file_is_measured_again(clock, length):  # noqa: F811
    path = stored_file(clock)
    path.write_text(path.read_text()[:length])
    assert gpu_config(CPU, torch.float32).stream_c == 16.0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "loop"])
def test_what_is_not_a_file_is_not_read(clock, kind):  # noqa: F811
    path = stored_file(clock)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else path)
    assert gpu_config(CPU, torch.float32).stream_c == 16.0


def test_a_folder_that_cannot_be_written_costs_one_line(clock, monkeypatch, caplog):  # noqa: F811
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "mkstemp", denied)
    with caplog.at_level(logging.INFO):
        configs = [gpu_config(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)]
        assert [each.stream_c for each in configs] == [2.0, 2.0]
        count = len(clock.asked)
        assert gpu_config(CPU, torch.float32) is configs[0]
    assert len(clock.asked) == count
    (line,) = caplog.messages
    assert "not writable (Permission denied)" in line
    assert "FAST_VIDEO_VAE_CACHE" in line


@pytest.mark.parametrize("written", ["meanwhile", "at last"])
def test_the_result_that_is_written_first_counts_without_locks(
    clock, monkeypatch, caplog, written  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(cache, "alone", lambda *_: nullcontext())
    replace, first = cache.replace, Probe(1e9, 64.0)

    def other(path, content):
        """Another process writes at this moment; Windows does not replace its open file."""
        monkeypatch.setattr(cache, "replace", replace)
        text = json.loads(content) | first._asdict()
        replace(path, json.dumps(text).encode())
        raise PermissionError(13, "Access is denied")

    def meanwhile():
        clock.does = lambda: None
        store.kept(CPU, torch.float32, lambda: first)

    if written == "meanwhile":
        clock.does = meanwhile
    else:
        monkeypatch.setattr(cache, "replace", other)
    assert gpu_config(CPU, torch.float32).stream_c == 64.0
    assert not caplog.messages
    clock.restart()
    assert gpu_config(CPU, torch.float32).stream_c == 64.0
    assert not clock.asked
