"""Memory runs out during a video: no frame is lost, and none is computed twice."""

import pytest
import torch

from fast_video_vae.kernels import is_out_of_memory
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    close,
    joined,
    latent_for,
    random_frames,
)
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.planning.plan import make_plan
from fast_video_vae.vae.streaming import session as video_module


@pytest.fixture(scope="module", params=VIDEO)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


class Memory:
    """Lets some allocations of a workspace fail."""

    def __init__(self, monkeypatch):
        self.count, self.fails, self.workspace = 0, set(), None
        allocate = Workspace.allocate

        def counted(workspace, nbytes, device):
            self.workspace = workspace
            self.count += 1
            if self.count in self.fails:
                raise torch.OutOfMemoryError(f"no {nbytes} bytes")
            return allocate(workspace, nbytes, device)

        monkeypatch.setattr(Workspace, "allocate", counted)

    def forget(self):
        """Let the next step allocate again."""
        self.workspace.release()


@pytest.fixture
def memory(monkeypatch):
    return Memory(monkeypatch)


@pytest.fixture
def products(monkeypatch):
    """Frames that each convolution computed in successful calls."""
    made = {}
    once = CausalConv3d.of_window

    def counted(self, x, *arguments, **options):
        y = once(self, x, *arguments, **options)
        made[self] = made.get(self, 0) + y.shape[2]
        return y

    monkeypatch.setattr(CausalConv3d, "of_window", counted)
    return made


def both(vae, latents=5, size=4):
    side = size * vae.config.spatial_compression
    video = random_frames(1, 3, 4 * latents - 3, side, side)
    return latent_for(vae, latents, side, side), video


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 5))])
def test_nothing_is_computed_twice(vae, memory, products, monkeypatch, at):
    # Without a smaller plan, because tiles compute their halos twice.
    monkeypatch.setattr(video_module, "smaller_plan", lambda work, plan: None)
    latent, video = both(vae)
    for stream, given in ((vae.decode_stream, latent), (vae.encode_stream, video)):
        made = []
        for fails in (set(), {at}):
            products.clear()
            memory.count, memory.fails = 0, fails
            joined(stream(given, StreamOptions(1)))
            made.append(dict(products))
        assert made[0] == made[1]


@pytest.mark.parametrize(
    "vae",
    ["wan2.1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wan2.2", "seedvr2"))],
    indirect=True,
)
def test_a_stream_continues_in_smaller_and_smaller_tiles(vae, memory, monkeypatch):
    """The tails of whole frames are cut into tiles, merged, and cut again."""
    latent, video = both(vae, size=12)
    tiles = []

    def smaller(work, plan):
        side = 96 // 2 ** len(tiles)
        tiles.append(make_plan(work, tile=(side, side)))
        return tiles[-1]

    monkeypatch.setattr(video_module, "smaller_plan", smaller)
    for stream, given in ((vae.decode_stream, latent), (vae.encode_stream, video)):
        memory.fails = set()
        expected = joined(stream(given, StreamOptions(1)))
        tiles.clear()
        pieces = []
        for index, piece in enumerate(stream(given, StreamOptions(1))):
            pieces.append(piece)
            if index < 3:
                memory.forget()
                memory.fails = {memory.count + 1}
        close(torch.cat(pieces, dim=2), expected)
        if vae.config.family != "seedvr2":
            assert len({plan.tiles for plan in tiles}) >= 2


def test_the_caller_is_asked_to_free_memory_first(vae, memory):
    latent, _ = both(vae)
    expected = joined(vae.decode_stream(latent, StreamOptions(1)))
    asked = []
    memory.count, memory.fails = 0, {3}
    options = StreamOptions(1, release=asked.append)
    close(joined(vae.decode_stream(latent, options)), expected)
    assert set(asked) == {vae.device}


def test_another_error_is_raised_at_once(vae, monkeypatch):
    latent, _ = both(vae)
    calls = []

    def broken(workspace, nbytes, device):
        calls.append(1)
        raise RuntimeError("a fault")

    monkeypatch.setattr(Workspace, "allocate", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        joined(vae.decode_stream(latent, StreamOptions(1)))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, is_memory):
    assert is_out_of_memory(error) == is_memory
