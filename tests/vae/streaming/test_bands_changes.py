"""Bands that change in a running video: in every mode of the caller, and when memory runs out."""

import contextlib
import itertools
import logging

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.products import each_value_once
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.tests.vae.streaming.test_bands import threads
from fast_video_vae.tests.vae.streaming.test_bands_faults import around, latent, number, run
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.oom import ExhaustedError
from fast_video_vae.vae.streaming import precision
from fast_video_vae.vae.streaming.bands import balance
from fast_video_vae.vae.streaming.bands.banded_executor import BandedDecode
from fast_video_vae.vae.streaming.bands.member import Member
from fast_video_vae.vae.streaming.tiled_executor import TiledDecode


@pytest.fixture
def vae():
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.devices = ["cpu"] * 3
    return vae


@pytest.fixture
def cuts(monkeypatch):
    """Cut other bands after the second and the fourth chunk; the spans of all chunks."""
    spans, turns = [], itertools.cycle([{0: 1, 1: 3, 2: 2}, {0: 2, 1: 1, 2: 1}])

    def noted(self, plans, bands, seconds, shape):
        spans.append(tuple(bands.spans.values()))
        return plans.recut(bands, next(turns)) if len(spans) in (2, 4) else None

    monkeypatch.setattr(balance.Balance, "note", noted)
    return spans


def alone(vae, task):
    """The result of one device."""
    single = load_vae(vae.state_dict(), dtype=torch.float32)
    return run(single, task)


MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


@each_value_once(mode=MODES, task=["decode", "encode"])
def test_bands_are_cut_again_in_every_mode(vae, cuts, task, mode):
    """The tails go to the bands that need them; at most twice, and with the same bits."""
    expected = alone(vae, task)
    with mode(), torch.autocast("cpu", torch.bfloat16):
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


@each_value_once(task=["decode", "encode"], device=[0, 1, 2])
def test_memory_that_runs_out_while_tails_move_is_freed(vae, cuts, short, task, device):
    memory = short[device] = FailingMemory(3)
    assert torch.equal(run(vae, task), alone(vae, task))
    assert memory.failed == 1
    assert len(vae.team.crew.members(vae.device)) == 3


@each_value_once(task=["decode", "encode"], devices=[(1,), (1, 2)], first=[1, 5])
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
    expected = alone(vae, "decode")

    def failing(device, _, work):
        if chosen and device == 1:
            raise RuntimeError("gone")
        return work()

    around(monkeypatch, failing)
    monkeypatch.setattr(balance, "_LEAST_S", 0)
    chosen = False
    stream = vae.decode_stream(latent(), StreamOptions(1))
    pieces = [next(stream)]
    vae.devices = ["cpu"] * 2
    chosen = True
    assert torch.equal(torch.cat([*pieces, *stream], 2), expected)
    assert vae.team.crew.members(vae.device).keys() == {0, 1}
    assert vae.team.crew.speeds((False, torch.float32)) == {}


def test_infinite_frames_of_a_device_that_fails_do_not_end_float16(monkeypatch, caplog):
    """The others compute its frames again."""
    monkeypatch.setattr(precision, "fp16_pays", lambda device: True)
    monkeypatch.setattr(precision, "_is_slow", lambda dtype: False)
    vae = load_vae(random_state_dict(8), dtype=torch.bfloat16)
    vae.allow_fp16, vae.devices, fill = True, ["cpu"] * 2, TiledDecode.fill
    dtypes = []

    def failing(self, x, *arguments):
        dtypes.append(x.dtype)
        broken = number() == 1
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
