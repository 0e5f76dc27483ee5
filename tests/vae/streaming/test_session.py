"""Equal chunks as CUDA graphs, and `torch.compile` around a VAE."""

import importlib

import pytest
import torch

from fast_video_vae.kernels import preparations
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import random_frames
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import plan

graphs = importlib.import_module("fast_video_vae.vae.streaming.cuda_graph")


@pytest.fixture
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


class StandIn:
    """A recording without CUDA. Like a capture, it does not change the state of the video.

    A replay runs the code again on the input memory of the recording, and writes to the memory of
    its results, as a graph does.
    """

    made = 0

    def __init__(self, run, x):
        type(self).made += 1
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


@pytest.fixture
def recorded(monkeypatch, plans_anew, vae):
    """A VAE with graphs that do not need CUDA."""
    monkeypatch.setattr(StandIn, "made", 0)
    monkeypatch.setattr(graphs, "Recording", StandIn)
    monkeypatch.setattr(graphs, "takes", lambda _: True)
    assert not vae.graphs
    vae.graphs = True
    return vae


@pytest.mark.parametrize(
    ("name", "shape", "chunk", "part_bytes", "made"),
    [
        ("decode", (1, 16, 9, 2, 3), 5, None, 0),
        ("decode", (1, 16, 13, 2, 2), 3, 1 << 12, 1),
        ("encode", (1, 3, 25, 16, 24), 1, None, 1),
    ],
)
def test_graphs_do_not_change_the_result(
    recorded, monkeypatch, name, shape, chunk, part_bytes, made
):
    if part_bytes:
        monkeypatch.setattr(plan, "_CPU_PARTS", (part_bytes,))
    run, x = getattr(recorded, name), random_frames(*shape)
    y = run(x, chunk)
    assert StandIn.made == made
    recorded.graphs = False
    assert torch.equal(y, run(x, chunk))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_graph_does_not_change_the_result(dtype):
    vae = load_vae(random_state_dict(32), dtype=dtype).cuda()
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


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("name", ["decode", "encode"])
def test_a_compiled_vae_runs_without_compilation(vae, compiler, name, network):
    """Nodes compile the VAE, or replace its networks by compiled modules."""
    given = []
    for size in ((5, 2, 2), (9, 2, 2), (9, 3, 2), (1, 2, 2)):
        frames, height, width = size
        shape = (1, 3, frames, 8 * height, 8 * width) if name == "encode" else (1, 16, *size)
        x = torch.rand(shape) * 2 - 1
        given.append((x, getattr(vae, name)(x)))
    run = getattr(vae, name)
    if network:
        setattr(vae, f"{name}r", torch.compile(getattr(vae, f"{name}r"), backend=compiler))
    else:
        run = torch.compile(run, backend=compiler)
    for x, expected in given:
        assert torch.equal(run(x), expected)
    assert not compiler.computed()


def test_code_around_a_vae_is_compiled(vae, compiler):
    @torch.compile(backend=compiler)
    def around(z):
        frames = vae.decode(z * 2)
        return frames + 1

    z = torch.randn(1, 16, 3, 2, 2)
    for length in (3, 3, 2):
        part = z[:, :, :length]
        assert torch.equal(around(part), vae.decode(part * 2) + 1)
    names = {node.target.__name__ for node in compiler.computed()}
    assert names <= {"mul", "add"}


# Warnings of Dynamo about the code around the computation; the second is of PyTorch 2.6.
@pytest.mark.filterwarnings("ignore:Dynamo", "ignore:Graph break due to unsupported builtin")
def test_a_stream_in_compiled_code_is_not_compiled(vae, compiler):
    z = torch.randn(1, 16, 4, 2, 2)

    @torch.compile(backend=compiler)
    def consume():
        return [piece.clone() for piece in vae.decode_stream(z, StreamOptions(1))]

    assert torch.equal(torch.cat(consume(), 2), vae.decode(z))
    assert {node.target for node in compiler.computed()} <= {"clone"}
