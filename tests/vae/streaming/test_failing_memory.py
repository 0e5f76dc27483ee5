"""Any allocation of a stream can fail: the frames stay correct, or the error is one line.

A dispatch mode makes the k-th allocation raise, once or several times in a row. An op raises before
it computes, as PyTorch's ops do, which allocate first.
"""

import functools
import io
import itertools
import logging
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

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
from fast_video_vae.vae.layers.temporal_cache import TemporalCache
from fast_video_vae.vae.media import (
    BackgroundWriter,
    VideoWriter,
    frames_to_uint8,
    read_video,
    save_latent,
)

# Three latents: the first, the second, and one after full tails. The code around the layers treats
# the last two the same, so its tasks run on two.
LATENTS, FEWER = 3, 2
TASKS = (
    "decode",
    "decode in steps",
    "picture",
    "part",
    "tiled decode",
    "to a file",
    "encode",
    "encode in steps",
    "picture in",
    "tiled encode",
    "static end",
)


@pytest.fixture(
    scope="module",
    params=["wan2.1", *(pytest.param(family, marks=pytest.mark.slow) for family in VIDEO[1:])],
)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


class Task:
    """A small stream, its result without failures, and the number of its allocations."""

    def __init__(self, vae, name, folder):
        self.vae, self.name, self.folder = vae, name, folder
        if vae.config.family == "seedvr2" and "tiled" in name:
            pytest.skip("SeedVR2 is never tiled")
        step = vae.config.spatial_compression
        side = 4 if "tiled" in name else 2
        self.tile = (2 * step, 2 * step)
        latents = FEWER if name in ("tiled decode", "tiled encode", "to a file") else LATENTS
        size = side * step, side * step
        self.latent = latent_for(vae, latents, *size)
        self.video = video = random_frames(1, 3, 4 * latents - 3, *size)
        self.static = torch.cat([video, video[:, :, -1:].expand(-1, -1, 28, -1, -1)], dim=2)
        self.run()  # derives the weights, which happens once
        self.expected = self.run()
        with FailingMemory() as memory:
            self.run()
        self.allocations = memory.seen

    def run(self):
        vae, latent, video = self.vae, self.latent, self.video
        steps, tiled = StreamOptions(1), StreamOptions(1, tile=self.tile)
        return {
            "decode": lambda: [vae.decode(latent)],
            "decode in steps": lambda: list(vae.decode_stream(latent, steps)),
            "picture": lambda: [vae.decode(latent[:, :, :1])],
            "part": lambda: list(vae.decode_stream(latent, steps, frames=range(3, 7))),
            "tiled decode": lambda: list(vae.decode_stream(latent, tiled)),
            "to a file": self._written,
            "encode": lambda: [vae.encode(video)],
            "encode in steps": lambda: list(vae.encode_stream(video, steps)),
            "picture in": lambda: [vae.encode(video[:, :, :1])],
            "static end": lambda: list(vae.encode_stream(self.static, steps)),
            "tiled encode": lambda: list(vae.encode_stream(video, tiled)),
        }[self.name]()

    def _written(self):
        path = self.folder / "decoded.mkv"
        writer = VideoWriter(path, 16, codec="ffv1")
        with writer, BackgroundWriter(writer.write) as background:
            relief = Relief(self.vae.device, "a decode")
            for piece in self.vae.decode_stream(self.latent, StreamOptions(1)):
                pictures = relief.finish(functools.partial(frames_to_uint8, piece))
                relief.finish(functools.partial(background.put, pictures))
        return [path.read_bytes()]

    def _pictures(self, files):
        """Return the frames of a file as bytes."""
        (content,) = files
        return [frame.numpy().tobytes() for frame in read_video(io.BytesIO(content)).frames()]

    def survives(self, memory):
        """Run with failing memory; return whether it finished. An error must have one line."""
        try:
            with memory:
                got = self.run()
        except torch.OutOfMemoryError as error:
            message = str(error)
            assert "\n" not in message
            assert len(message) <= 160
            assert message.startswith("memory ran out in "), message
            return False
        if self.name == "to a file":
            assert self._pictures(got) == self._pictures(self.expected)
        else:
            close(torch.cat(got, dim=2), torch.cat(self.expected, dim=2))
        return True


@pytest.fixture(params=TASKS)
def task(request, vae, tmp_path):
    return Task(vae, request.param, tmp_path)


def sampled(task, count):
    """Return about `count` numbers of allocations, from first to last, at uneven distances."""
    step = max(1, task.allocations // count)
    return [min(task.allocations, k + k // step % 7) for k in range(1, task.allocations + 1, step)]


def fail_each(task, places, in_a_row):
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        memory = FailingMemory(place, in_a_row, error=error)
        whole = task.survives(memory)
        assert memory.failed
        # A stream recovers from a single failure at any place.
        assert whole or in_a_row > 1, f"allocation {place} of {task.allocations}"


def test_one_failed_allocation_does_not_change_the_result(task):
    fail_each(task, sampled(task, 5), 1)


@pytest.mark.parametrize("family", VIDEO[1:])
@pytest.mark.parametrize("name", ["decode in steps", "encode in steps"])
def test_one_failed_allocation_in_other_families(family, name, tmp_path):
    task = Task(load_vae(STATES[family](), dtype=torch.float32), name, tmp_path)
    fail_each(task, sampled(task, 4), 1)


@pytest.mark.parametrize("in_a_row", [2, 10])
def test_repeated_failures_give_frames_or_one_line(vae, tmp_path, in_a_row):
    for name in ("decode in steps", "encode in steps"):
        task = Task(vae, name, tmp_path)
        fail_each(task, sampled(task, 5), in_a_row)


@pytest.mark.nightly
@pytest.mark.parametrize("in_a_row", [1, 2, 10])
@pytest.mark.parametrize(
    "name", ["decode in steps", "encode in steps", "picture", "tiled decode", "to a file"]
)
def test_any_allocation_can_fail(vae, tmp_path, name, in_a_row):
    task = Task(vae, name, tmp_path)
    fail_each(task, range(1, task.allocations + 1), in_a_row)


@pytest.mark.parametrize("name", ["decode in steps", "encode in steps", "picture"])
def test_tails_can_move_at_any_attempt(vae, tmp_path, monkeypatch, name):
    """On a GPU tails move to the host, so each attempt must look them up again."""

    moved = []

    def park(self):
        moved.append(len(self._tails))
        self._tails = {conv: tail.clone() for conv, tail in self._tails.items()}
        return True

    task = Task(vae, name, tmp_path)
    monkeypatch.setattr(TemporalCache, "park", park)
    for place in sampled(task, 16):
        # Before the first layer no tail can be moved, so two failures end the stream.
        assert task.survives(FailingMemory(place, 2)) or not moved
        moved.clear()


@pytest.mark.parametrize("name", ["decode in steps", "encode in steps", "picture"])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.25])
def test_large_allocations_can_fail(vae, tmp_path, name, share):
    task = Task(vae, name, tmp_path)
    with FailingMemory() as memory:
        task.run()
    task.survives(FailingMemory(most=int(share * memory.largest)))


def test_short_memory_logs_one_warning_and_raises_one_line(vae, tmp_path, caplog):
    latent = torch.randn(1, vae.config.latent_channels, 12, 2, 2)
    expected = joined(vae.decode_stream(latent, StreamOptions(1)))
    with FailingMemory() as memory:
        list(vae.decode_stream(latent, StreamOptions(1)))
    every = FailingMemory(every=1, error="linux")
    message = r"^memory ran out in a decode \([^\n]+\); use smaller tiles, frames or chunks$"
    failing = pytest.raises(torch.OutOfMemoryError, match=message)
    with caplog.at_level(logging.INFO), failing, every:
        list(vae.decode_stream(latent, StreamOptions(1)))
    assert len(caplog.records) <= 1
    caplog.clear()
    often = FailingMemory(every=memory.seen // 24)
    with caplog.at_level(logging.INFO), often:
        pieces = list(vae.decode_stream(latent, StreamOptions(1)))
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
