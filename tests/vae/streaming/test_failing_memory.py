"""Memory runs out: nothing is lost or computed twice, the plan gets smaller, one line is logged.

`test_any_way.py` lets any allocation of any stream fail.
"""

import functools
import io
import itertools
import logging
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import is_out_of_memory
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    close,
    joined,
    latent_for,
    random_frames,
)
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory
from fast_video_vae.vae import Relief, StreamOptions, load_vae
from fast_video_vae.vae.cli.main import main
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.layers.workspace import Workspace
from fast_video_vae.vae.media import (
    BackgroundWriter,
    VideoWriter,
    frames_to_uint8,
    read_video,
    save_latent,
)
from fast_video_vae.vae.planning.plan import make_plan
from fast_video_vae.vae.streaming import session as video_module

STEP = StreamOptions(1)


@pytest.fixture(scope="module", params=VIDEO)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


@pytest.fixture
def memory(monkeypatch):
    """Lets some allocations of a workspace fail."""

    class Memory:
        count, fails, workspace = 0, set(), None

    allocate = Workspace.allocate

    def counted(workspace, nbytes, device):
        Memory.workspace = workspace
        Memory.count += 1
        if Memory.count in Memory.fails:
            raise torch.OutOfMemoryError(f"no {nbytes} bytes")
        return allocate(workspace, nbytes, device)

    monkeypatch.setattr(Workspace, "allocate", counted)
    return Memory


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
    return (vae.decode_stream, latent_for(vae, latents, side, side)), (vae.encode_stream, video)


def test_nothing_is_computed_twice(vae, memory, products, monkeypatch):
    # Without a smaller plan, because tiles compute their halos twice.
    monkeypatch.setattr(video_module, "smaller_plan", lambda work, plan: None)
    for stream, given in both(vae):
        made = []
        for fails in (set(), {2}):
            products.clear()
            memory.count, memory.fails = 0, fails
            joined(stream(given, STEP))
            made.append(dict(products))
        assert made[0] == made[1]
        assert memory.count >= 2


@pytest.mark.parametrize(
    "vae",
    ["wan2.1", *(pytest.param(name, marks=pytest.mark.slow) for name in VIDEO[1:])],
    indirect=True,
)
def test_a_stream_continues_in_smaller_and_smaller_tiles(vae, memory, monkeypatch):
    """The tails of whole frames are cut into tiles, merged, and cut again."""
    tiles = []

    def smaller(work, plan):
        side = 96 // 2 ** len(tiles)
        tiles.append(make_plan(work, tile=(side, side)))
        return tiles[-1]

    monkeypatch.setattr(video_module, "smaller_plan", smaller)
    for stream, given in both(vae, size=12):
        memory.fails = set()
        expected = joined(stream(given, STEP))
        tiles.clear()
        pieces = []
        for index, piece in enumerate(stream(given, STEP)):
            pieces.append(piece)
            if index < 3:
                memory.workspace.release()  # the next step allocates again
                memory.fails = {memory.count + 1}
        close(torch.cat(pieces, dim=2), expected)
        if vae.config.family != "seedvr2":
            assert len({plan.tiles for plan in tiles}) >= 2


def test_the_caller_is_asked_to_free_memory_first(vae, memory):
    asked = []
    for stream, given in both(vae):
        memory.fails = set()
        expected = joined(stream(given, STEP))
        memory.count, memory.fails = 0, {1}
        close(joined(stream(given, StreamOptions(1, release=asked.append))), expected)
        assert asked == [vae.device]
        asked.clear()


def test_another_error_is_raised_at_once(vae, monkeypatch):
    calls = []

    def broken(workspace, nbytes, device):
        calls.append(1)
        raise RuntimeError("a fault")

    monkeypatch.setattr(Workspace, "allocate", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        joined(vae.decode_stream(latent_for(vae, 5, 32, 32), STEP))
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


@pytest.mark.parametrize("vae", ["wan2.1"], indirect=True)
@pytest.mark.parametrize("share", [0.8, 0.5, 0.25])
def test_large_allocations_can_fail(vae, share):
    for stream, given in both(vae, latents=3):
        with FailingMemory() as memory:
            expected = joined(stream(given, STEP))
        try:
            with FailingMemory(most=int(share * memory.largest)):
                pieces = list(stream(given, STEP))
        except torch.OutOfMemoryError as error:
            message = str(error)
            assert message.startswith("memory ran out in ")
            assert message.isprintable()
        else:
            close(torch.cat(pieces, dim=2), expected)


@pytest.mark.parametrize("vae", ["wan2.1"], indirect=True)
def test_a_file_has_every_frame_whatever_allocation_fails(vae, tmp_path):
    latent, path = latent_for(vae, 2, 16, 16), tmp_path / "decoded.mkv"

    def written(memory):
        writer = VideoWriter(path, 16, codec="ffv1", overwrite=True)
        with memory, writer, BackgroundWriter(writer.write) as background:
            relief = Relief(vae.device, "a decode")
            for piece in vae.decode_stream(latent, STEP):
                pictures = relief.finish(functools.partial(frames_to_uint8, piece))
                relief.finish(functools.partial(background.put, pictures))
        frames = read_video(io.BytesIO(path.read_bytes())).frames()
        return [frame.numpy().tobytes() for frame in frames]

    written(FailingMemory())  # derives the weights, which happens once
    counted = FailingMemory()
    expected = written(counted)
    places = range(1, counted.seen + 1, counted.seen // 6)
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        memory = FailingMemory(place, error=error)
        assert written(memory) == expected
        assert memory.failed


@pytest.mark.parametrize("vae", ["wan2.1"], indirect=True)
def test_short_memory_logs_one_warning_and_raises_one_line(vae, caplog):
    latent = torch.randn(1, vae.config.latent_channels, 12, 2, 2)
    expected = joined(vae.decode_stream(latent, STEP))
    with FailingMemory() as memory:
        list(vae.decode_stream(latent, STEP))
    every = FailingMemory(every=1, error="linux")
    message = r"^memory ran out in a decode \([^\n]+\); use smaller tiles, frames or chunks$"
    failing = pytest.raises(torch.OutOfMemoryError, match=message)
    with caplog.at_level(logging.INFO), failing, every:
        list(vae.decode_stream(latent, STEP))
    assert len(caplog.records) <= 1
    caplog.clear()
    often = FailingMemory(every=memory.seen // 24)
    with caplog.at_level(logging.INFO), often:
        pieces = list(vae.decode_stream(latent, STEP))
    close(torch.cat(pieces, dim=2), expected)
    assert often.failed > 12
    (record,) = caplog.records
    assert "\n" not in record.message
    assert "memory ran out" in record.message


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("first", [1, 200])  # while the file is loaded, and while it decodes
def test_the_command_line_prints_one_line(tmp_path, capsys, error, first):
    latents = tmp_path / "latents.safetensors"
    latent = torch.zeros(1, 16, 2, 2, 2)
    save_latent(latents, latent, family="wan2.1", fps=Fraction(16), frames=5)
    path = tmp_path / "vae.safetensors"
    save_file(STATES["wan2.1"](), path)
    with FailingMemory(first, 1 << 40, error=error):
        code = main(["decode", str(latents), "--vae", str(path), "-o", str(tmp_path / "x.mkv")])
    assert code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("fast-video-vae: error: memory ran out in ")
    assert printed.count("\n") == 1
    assert {each.name for each in tmp_path.iterdir()} == {latents.name, path.name}
