"""A driver that refuses CUDA graphs: one line in the log, and the chunks run without one."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.streaming import cuda_graph


@pytest.fixture
def cuda(monkeypatch):
    """Replace the parts of `torch.cuda` that a recording uses.

    `current` is the current stream; `refusals` holds the errors that the functions of the driver
    raise, by name.
    """
    state = SimpleNamespace(current="stream of the caller", refusals={}, resets=0)

    def driver(name):
        if name in state.refusals:
            raise state.refusals[name]

    class Graph:
        def replay(self):
            driver("launch")

        def reset(self):
            state.resets += 1

    @contextlib.contextmanager
    def stream(chosen):
        before, state.current = state.current, chosen
        try:
            yield
        finally:
            state.current = before

    class Capture:
        """Like `torch.cuda.graph`, it does not leave its stream if the driver refuses."""

        def __init__(self, graph, capture_error_mode):
            pass

        def __enter__(self):
            self._before, state.current = state.current, "stream of the capture"
            driver("begin")

        def __exit__(self, *_):
            driver("end")
            state.current = self._before

    for name, value in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "stream": stream,
        "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: state.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(errors, "_logged", set())
    return state


REFUSALS = [
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: operation not supported"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    AssertionError("capture_stream must not be None"),
]


def test_results_of_a_replay_are_copies_until_a_launch_is_refused(cuda):
    recording = cuda_graph.Recording(lambda x: [x + 1, x + 2], torch.zeros(3))
    first, second = recording.replay(torch.zeros(3))
    first.zero_()
    assert [y.tolist() for y in recording.replay(torch.zeros(3))] == [[1] * 3, [2] * 3]
    assert second.tolist() == [2, 2, 2]
    cuda.refusals["launch"] = RuntimeError("CUDA error: invalid argument")
    with pytest.raises(RuntimeError, match="invalid argument"):
        recording.replay(torch.zeros(3))
    assert cuda.resets == 1  # the memory of the graph is free


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_refused_capture_leaves_the_stream_of_the_caller(cuda, call, error):
    cuda.refusals[call] = error
    with pytest.raises(RuntimeError, match=str(error)):
        cuda_graph.Recording(lambda x: [x + 1], torch.zeros(3))
    assert cuda.current == "stream of the caller"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_the_frames_come_from_a_driver_that_refuses_graphs(cuda, monkeypatch, caplog, error):
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    z = torch.randn(1, 16, 5, 2, 2)
    expected = vae.decode(z, 1)
    monkeypatch.setattr(cuda_graph, "takes", lambda _: True)
    vae.graphs, cuda.refusals["begin"] = True, error
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(vae.decode(z, 1), expected)
    (line,) = caplog.messages
    assert "no CUDA graph of the VAE" in line
    assert cuda.current == "stream of the caller"
