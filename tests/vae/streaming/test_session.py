"""CUDA graphs, whose frames `test_any_way.py` shows, and `torch.compile` around a VAE."""

import importlib
import logging

import pytest
import torch

from fast_video_vae.kernels import errors, preparations
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import load_vae

graphs = importlib.import_module("fast_video_vae.vae.streaming.cuda_graph")


@pytest.fixture
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


class StandIn:
    """A recording without CUDA. Like a capture, it does not change the state of the video.

    A replay runs the code again on the input memory of the recording, and writes to the memory of
    its results, as a graph does.
    """

    def __init__(self, run, x):
        self._run, self._input = run, x.clone()
        tails = run.__self__.cache.tails
        before = {conv: tail.clone() for conv, tail in tails.items()}
        places = {conv: tail.data_ptr() for conv, tail in tails.items()}
        self._results = list(run(self._input))
        assert places == {conv: tail.data_ptr() for conv, tail in tails.items()}
        for conv, tail in before.items():
            tails[conv].copy_(tail)

    def replay(self, x):
        assert (x.shape, x.stride(), x.dtype) == (
            self._input.shape, self._input.stride(), self._input.dtype,
        )  # fmt: skip
        self._input.copy_(x)
        for result, fresh in zip(self._results, self._run(self._input), strict=True):
            result.copy_(fresh)
            yield result.clone()


def test_the_frames_come_from_a_driver_that_refuses_graphs(vae, monkeypatch, caplog):
    def refuses(*_):
        raise RuntimeError("CUDA error: operation not supported\nand a long story")

    z = torch.randn(1, 16, 5, 2, 2)
    expected = vae.decode(z, 1)
    monkeypatch.setattr(graphs, "Recording", refuses)
    monkeypatch.setattr(graphs, "takes", lambda _: True)
    monkeypatch.setattr(errors, "_logged", set())
    vae.graphs = True
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(vae.decode(z, 1), expected)
    (line,) = caplog.messages
    assert line.endswith("launched one by one (CUDA error: operation not supported)")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_a_real_graph_does_not_change_the_result():
    vae = load_vae(random_state_dict(32), dtype=torch.bfloat16).cuda()
    z = torch.randn(1, 16, 12, 8, 12, device="cuda")
    plain, before = vae.decode(z, 2), preparations()
    vae.graphs = True
    torch.testing.assert_close(vae.decode(z, 2), plain, rtol=0, atol=0.02)
    assert "graph capture" in {each.kind for each in preparations()[len(before) :]}


class Compiler:
    """A `torch.compile` backend that stores the graphs it gets, and runs them unchanged."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, _):
        self.graphs.append(graph)
        return graph.forward

    def computed(self):
        """Return the operations of all graphs."""
        calls = ("call_function", "call_method", "call_module")
        return [node for graph in self.graphs for node in graph.graph.nodes if node.op in calls]


@pytest.fixture
def compiler():
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield Compiler()
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "network"), [("decode", False), ("encode", True)])
def test_a_compiled_vae_runs_without_compilation(vae, compiler, name, network):
    """Nodes compile the VAE, or replace its networks by compiled modules."""
    given = []
    for frames, height, width in ((5, 2, 2), (9, 3, 2), (1, 2, 2)):
        shape = (3, frames, 8 * height, 8 * width) if network else (16, frames, height, width)
        x = torch.rand(1, *shape) * 2 - 1
        given.append((x, getattr(vae, name)(x)))
    run = getattr(vae, name)
    if network:
        setattr(vae, f"{name}r", torch.compile(getattr(vae, f"{name}r"), backend=compiler))
    else:
        run = torch.compile(run, backend=compiler)
    for x, expected in given:
        assert torch.equal(run(x), expected)
    assert not compiler.computed()
