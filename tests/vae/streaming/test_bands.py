"""Several devices, or processes, give the result of one, each with a band of the frames."""

import re
import threading

import pytest
import torch
from hypothesis import given

from fast_video_vae.kernels import errors
from fast_video_vae.tests.vae.families import STATES, joined, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.processes import Processes, failing
from fast_video_vae.tests.vae.test_any_way import SEEDS, check_both, same, vae_of
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.streaming.bands.banded_executor import BandedExecutor
from fast_video_vae.vae.streaming.tiled_executor import TiledExecutor


@pytest.fixture
def wan():
    return load_vae(STATES["wan2.1"](), dtype=torch.float32)


@pytest.fixture
def banded(monkeypatch):
    """The number of the bands of each video."""
    counts, begin = [], BandedExecutor.__init__

    def begun(self, work, plan, *arguments):
        counts.append(len(plan.members))
        begin(self, work, plan, *arguments)

    monkeypatch.setattr(BandedExecutor, "__init__", begun)
    return counts


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("fast-video-vae")]


def inputs(vae, latents, height, width, batch=1):
    frames = vae.config.frames(latents)
    video = random_frames(batch, vae.config.image_channels, frames, height, width)
    return latent_for(vae, latents, height, width, batch), video


@same(max_examples=4)
@given(SEEDS)
def test_devices_give_the_same_video(seed):
    check_both(seed, shared=True)


@pytest.fixture(scope="module")
def processes():
    processes = Processes(3)
    yield processes
    processes.close()


def test_ranks_give_the_bits_of_one_device(processes, wan):
    latent, video = inputs(wan, 3, 32, 96)
    decoded, encoded = wan.decode(latent), wan.encode(video)
    with processes.shared(wan, 3, [1, 2, 1], vae_of, "wan2.1", 1, "whole", "auto"):
        actual = wan.decode(latent), wan.encode(video)
    assert torch.equal(actual[0], decoded)
    assert torch.equal(actual[1], encoded)


@pytest.mark.parametrize(
    ("task", "calls", "error", "text"),
    [
        ("encode", 0, RuntimeError("gone\n"), "gone"),
        ("decode", 7, torch.OutOfMemoryError("no room"), "memory ran out .*"),
    ],
)
def test_a_video_goes_on_without_a_rank_that_fails(
    processes, wan, caplog, task, calls, error, text
):
    latent, video = inputs(wan, 5, 16, 96)
    run, source = getattr(wan, f"{task}_stream"), latent if task == "decode" else video
    expected = joined(run(source, StreamOptions(1)))
    with processes.shared(wan, 3, None, failing, 1, calls, error):
        for _ in range(2):
            assert torch.equal(joined(run(source, StreamOptions(1))), expected)
    (line,) = [x.getMessage() for x in caplog.records if "Fast Video VAE" in x.getMessage()]
    going_on = rf".* rank 1 of 3 failed: {text} in .*; going on with cpu, rank 2 of 3"
    assert re.fullmatch(going_on, line)


@pytest.mark.parametrize(
    ("family", "count", "shares", "height", "width", "latents", "chunk", "batch"),
    [
        ("wan2.1", 2, [1, 3], 144, 112, 3, -1, 1),  # unequal, rows
        ("wan2.1", 3, [1, 4, 2], 96, 128, 4, 2, 2),  # a batch, a last chunk of its own length
        ("wan2.2", 2, "memory", 64, 96, 2, 1, 1),
        ("qwen-image-2.1", 2, None, 64, 96, 1, None, 1),  # one frame
    ],
)
def test_bands_give_the_bits_of_one_device(
    banded, family, count, shares, height, width, latents, chunk, batch
):
    vae = load_vae(STATES[family](), dtype=torch.float32)
    latent, video = inputs(vae, latents, height, width, batch)
    decoded, encoded = vae.decode(latent, chunk), vae.encode(video, chunk)
    assert not banded
    vae.devices, vae.shares = ["cpu"] * count, shares
    assert torch.equal(vae.decode(latent, chunk), decoded)
    assert torch.equal(vae.encode(video, chunk), encoded)
    assert len(banded) == 2
    assert min(banded) > 1
    assert not threads()


def test_threads_end_with_the_stream(wan):
    latent, _ = inputs(wan, 6, 32, 96)
    wan.devices = ["cpu"] * 3
    stream = wan.decode_stream(latent, StreamOptions(1))
    next(stream)
    same = set(threads())
    assert len(same) in (2, 3)
    next(stream).add_(1).requires_grad_()  # no inference tensor
    assert set(threads()) == same
    stream.close()
    assert not threads()


def test_each_device_has_its_share_of_the_cores_and_the_caller_all_of_them(wan, monkeypatch):
    """Also after the first op of the native library in its thread, and in later threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found, work = [], TiledExecutor.fill

    def noted(self, *arguments):
        work(self, *arguments)
        found.append(torch.get_num_threads())

    monkeypatch.setattr(TiledExecutor, "fill", noted)
    latent, _ = inputs(wan, 3, 32, 96)
    wan.devices = ["cpu"] * 2
    joined(wan.decode_stream(latent, StreamOptions(1)))
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    now = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (found, now) == ([1] * 6 + [2], 2)


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["cpu", "gpu9"], "gpu9"), ("cpu", "expected a list"), ([None], "None")],
)
def test_unknown_devices_are_refused_in_one_line(wan, devices, message):
    with pytest.raises(ValueError, match="device") as caught:
        wan.devices = devices
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert wan.devices == []


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, float("nan")], "1,2"])
def test_unknown_shares_are_refused_in_one_line(wan, shares):
    wan.devices = ["cpu"] * 2
    with pytest.raises(ValueError, match=r"^shares are .*; expected 2 positive numbers"):
        wan.shares = shares
    assert wan.shares is None


def test_seedvr2_runs_on_its_own_device(monkeypatch, caplog):
    vae = load_vae(STATES["seedvr2"](), dtype=torch.float32)
    latent, video = inputs(vae, 2, 16, 16)
    decoded, encoded = vae.decode(latent), vae.encode(video)
    monkeypatch.setattr(errors, "_logged", set())
    vae.devices = ["cpu"] * 2
    assert torch.equal(vae.decode(latent), decoded)
    assert torch.equal(vae.encode(video), encoded)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cpu computes each video alone: the norms of SeedVR2" in line
