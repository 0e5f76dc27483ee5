"""Bands that change in a running video: in every mode of the caller, and when memory runs out."""

import contextlib
import itertools
import logging
import threading

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import joined, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.oom import ExhaustedError
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.bands import balance
from fast_video_vae.vae.streaming.bands.banded_executor import BandedDecode
from fast_video_vae.vae.streaming.bands.member import Member
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode

LATENTS, HEIGHT, WIDTH = 7, 16, 96


@pytest.fixture
def vae():
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


@pytest.fixture
def cuts(monkeypatch):
    """Cut other bands after the second and the fourth chunk; the spans of all chunks."""
    spans, turns = [], itertools.cycle([{0: 1, 1: 3, 2: 2}, {0: 2, 1: 1, 2: 1}])

    def noted(self, plans, bands, seconds):
        spans.append(tuple(bands.spans.values()))
        return plans.recut(bands, next(turns)) if len(spans) in (2, 4) else None

    monkeypatch.setattr(balance.Balance, "note", noted)
    return spans


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("fast-video-vae")]


def run(vae, task):
    if task == "decode":
        return joined(vae.decode_stream(latent_for(vae, LATENTS, HEIGHT, WIDTH), StreamOptions(1)))
    video = random_frames(1, 3, 4 * LATENTS - 3, HEIGHT, WIDTH)
    return joined(vae.encode_stream(video, StreamOptions(1)))


def alone(vae, task):
    """The result of one device."""
    single = load_vae(vae.state_dict(), dtype=torch.float32)
    return run(single, task)


MODES = {
    "grad": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,  # as ComfyUI calls
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["decode", "encode"])
def test_bands_are_cut_again_in_every_mode(vae, cuts, task, mode):
    expected = alone(vae, task)
    with MODES[mode]():
        assert torch.equal(run(vae, task), expected)
    assert len(set(cuts)) == 3


@pytest.fixture
def short(monkeypatch):
    """Let allocations fail while tails move to devices, by number: a `FailingMemory` each."""
    memories, take = {}, Member.take

    def taken(self, tails):
        with memories.get(self.number, contextlib.nullcontext()):
            take(self, tails)

    monkeypatch.setattr(Member, "take", taken)
    return memories


@pytest.mark.parametrize("task", ["decode", "encode"])
@pytest.mark.parametrize("device", [0, 1, 2])
def test_memory_that_runs_out_while_tails_move_is_freed(vae, cuts, short, task, device):
    memory = short[device] = FailingMemory(3)
    assert torch.equal(run(vae, task), alone(vae, task))
    assert memory.failed == 1
    assert len(vae.team.crew.members(vae.device)) == 3


@pytest.mark.parametrize("task", ["decode", "encode"])
@pytest.mark.parametrize("devices", [[1], [1, 2]])
@pytest.mark.parametrize("first", [1, 5])
def test_a_device_that_takes_no_tails_is_left_out(vae, cuts, short, caplog, task, devices, first):
    short.update({device: FailingMemory(first, 10_000) for device in devices})
    expected = alone(vae, task)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(vae, task), expected)
    assert sum("failed" in each.getMessage() for each in caplog.records) == len(devices)
    assert not threads()


@pytest.mark.parametrize("task", ["decode", "encode"])
def test_memory_of_the_first_device_that_takes_no_tails_is_one_line(vae, cuts, short, task):
    short[0] = FailingMemory(1, 10_000)
    with pytest.raises(ExhaustedError, match=r"20\.00 MiB more were needed"):
        run(vae, task)
    assert not threads()


def test_the_bands_stay_if_their_tails_cannot_be_read(vae, cuts, monkeypatch):
    expected, memories = alone(vae, "decode"), iter([FailingMemory(1), FailingMemory(4)])
    read = BandedDecode.tails

    def failing(self):
        with next(memories) as memory:
            try:
                return read(self)
            finally:
                assert memory.failed

    monkeypatch.setattr(BandedDecode, "tails", failing)
    assert torch.equal(run(vae, "decode"), expected)
    assert len(set(cuts)) == 1


def test_a_running_video_keeps_the_devices_that_it_started_with(vae, monkeypatch):
    """What happens there says nothing about the devices that are chosen meanwhile."""
    expected, fill = alone(vae, "decode"), TiledDecode.fill

    def failing(self, *arguments):
        if chosen and threading.current_thread().name.split("-")[3] == "1":
            raise RuntimeError("gone")
        fill(self, *arguments)

    monkeypatch.setattr(TiledDecode, "fill", failing)
    monkeypatch.setattr(balance, "_LEAST_S", 0)
    chosen = False
    latent = latent_for(vae, LATENTS, HEIGHT, WIDTH)
    stream = vae.decode_stream(latent, StreamOptions(1))
    pieces = [next(stream)]
    vae.devices = ["cpu"] * 2
    chosen = True
    assert torch.equal(torch.cat([*pieces, *stream], 2), expected)
    assert vae.team.crew.members(vae.device).keys() == {0, 1}
    assert vae.team.crew.speeds((False, torch.float32)) == {}
    vae.device_speeds = [1, 2]
    assert vae.device_speeds == [1, 2]


def test_infinite_frames_of_a_device_that_fails_do_not_end_float16(monkeypatch, caplog):
    """The others compute its frames again."""
    monkeypatch.setattr(precision, "fp16_pays", lambda device: True)
    monkeypatch.setattr(precision, "_is_slow", lambda dtype: False)
    vae = load_vae(random_state_dict(8), dtype=torch.bfloat16)
    vae.allow_fp16, vae.devices, fill = True, ["cpu"] * 2, TiledDecode.fill
    dtypes = []

    def failing(self, x, *arguments):
        dtypes.append(x.dtype)
        broken = "-1-" in threading.current_thread().name
        fill(self, x * float("inf") if broken else x, *arguments)
        if broken:
            raise RuntimeError("gone")

    monkeypatch.setattr(TiledDecode, "fill", failing)
    with caplog.at_level(logging.WARNING):
        frames = run(vae, "decode")
    assert frames.isfinite().all()
    assert set(dtypes) == {torch.float16}
    assert vae.allow_fp16
    assert len(caplog.records) == 1
