"""Stacks of LoRAs in one block of memory: their rows, sharing, memory and copies."""

import contextlib
import gc
import os
import sys
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.lora.offload import BankLoader
from fast_video_vae.tests.benchmarks import lora_loading
from fast_video_vae.tests.lora import nets
from fast_video_vae.tests.lora.models import random_pairs, spelled


def test_the_same_files_share_a_bank_in_use(stack):
    made, shapes = stack(model := nets.Model()), nets.Model(blocks=4).shapes()
    paths, targets = made.paths, made.targets
    bank = load_bank(paths, targets)
    assert load_bank(list(map(str, paths)), Targets(model.shapes(), nets.PARTS)) is bank
    others = [
        load_bank(paths[:2], targets),
        load_bank(paths[::-1], targets),
        load_bank(paths, targets, torch.bfloat16),
        load_bank(paths, Targets(shapes, nets.PARTS)),
        load_bank(paths, Targets(model.shapes())),
    ]
    for content in paths[:2]:  # another time, then another size
        paths[0].write_bytes(content.read_bytes())
        os.utime(paths[0], ns=(1, 1))
        others.append(load_bank(paths, targets))
    assert len({bank, *others}) == 1 + len(others)
    paths[2].write_bytes(paths[2].read_bytes()[:-2] + b"\xff\xff")  # a NaN
    for _ in range(2):  # what cannot be read is not kept
        with pytest.raises(ValueError, match=r"2\.safetensors: .* finite"):
            load_bank(paths, targets)
    gone = weakref.ref(bank)
    del bank
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the system counts no peak memory")
def test_reading_takes_the_memory_of_the_bank_and_two_layers(tmp_path):
    measured = lora_loading.measure(tmp_path, blocks=3)
    assert measured["bank"] == 3 * 3 * 64 * 2 * 2 * (8 * 5120 + 5120 + 13824)
    assert measured["peak"] <= measured["bank"] + 2 * measured["layer"]


class NoHostReads(TorchDispatchMode):
    """Refuses operations that read tensors in the host's memory."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for each in args:
            assert not isinstance(each, torch.Tensor) or each.is_meta or not each.ndim, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["stream", "bypass"])
def test_a_bank_moves_as_a_whole_and_nothing_is_copied_from_the_host_in_later_calls(write, mode):
    """With DoRAs, differences, biases and modulations; the device here has no values."""
    model, tensors = nets.Model(nets.Casting), {}
    for block in (f"blocks.{number}" for number in range(3)):
        tensors |= spelled(random_pairs(model.shapes(), [f"{block}.self_attn.q"]))
        tensors[f"{block}.self_attn.q.lora_magnitude_vector"] = torch.rand(16)
        tensors[f"{block}.self_attn.o.diff"] = torch.rand(16, 16).half()
        tensors[f"{block}.ffn.0.diff_b"] = torch.rand(24)
        tensors[f"{block}.diff_m"] = torch.rand(1, 6, 16)
    bank = load_bank([write(tensors)], Targets(model.shapes()))
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert bank.nbytes == held == sum(value.nbytes for value in bank.state_dict().values())
    places = [value.data_ptr() for value in bank.parameters()]
    assert [value.data_ptr() for value in bank.copy().parameters()] == places
    device, x = torch.device("meta"), nets.video().to("meta")
    model.to(device)
    bank.to(device)
    session = nets.session_of(bank, [0.5], mode)
    for check in (contextlib.nullcontext(), NoHostReads()):
        with check, torch.no_grad(), session.call(model, device):
            model(x)
    assert not session.counts.unserved


def test_a_buffer_is_kept_until_its_copy_is_done(stack, monkeypatch):
    """The allocator knows of each copy, so a run that ends early frees nothing too soon."""
    bank = stack(nets.Model(), "self_attn").session().bank
    copied, recorded, (new_empty, copy) = [], [], (torch.Tensor.new_empty, torch.Tensor.copy_)

    def copy_(target, source, *, non_blocking=False):
        copied.extend([target.data_ptr()] * non_blocking)
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, count, **_: new_empty(like, count))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda to, _: recorded.append(to.data_ptr()))
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    loader = BankLoader(bank, torch.device("cuda", 0))
    for layer in bank.layers.values():
        loader.pairs(layer)
    assert len(copied) == 3 + 1
    assert recorded == copied
