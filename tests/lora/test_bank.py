"""Stacks of LoRAs in one block of memory: their rows, sharing, memory and copies."""

import contextlib
import gc
import math
import os
import sys
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.lora.bank import block_of, load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.offload import BankLoader
from fast_video_vae.tests.lora import loading, models
from fast_video_vae.tests.lora.models import PREFIX, modules, random_pairs, spelled, wan
from fast_video_vae.tests.lora.nets import Casting, Model, session_of, video

WAN = wan(blocks=3)
TARGETS = Targets(WAN)
NAMES = modules(WAN)
ATTENTION = [name for name in NAMES if "self_attn" in name]
Q = f"{PREFIX}blocks.1.self_attn.q"

# Of three files: modules, rank, alpha and dtype.
FILES = (
    (NAMES, 4, 2, torch.float32),
    (ATTENTION, 3, None, torch.float16),
    (NAMES[5:], 16, 8, torch.bfloat16),
)


@pytest.fixture
def stack(write):
    """Return the pairs and the paths of `FILES`."""
    pairs, paths = [], []
    for names, rank, alpha, dtype in FILES:
        pairs.append(random_pairs(WAN, names, rank, seed=rank, dtype=dtype))
        paths.append(write(spelled(pairs[-1], alpha=alpha), f"{rank}.safetensors"))
    return pairs, paths


def test_a_layer_has_the_pairs_of_all_files_padded_with_zeros(stack):
    """Of any dtype in that of the computation, and of convolutions too."""
    pairs, paths = stack
    bank = load_bank(paths, TARGETS, torch.bfloat16)
    assert len(bank.layers) == len(NAMES)
    for name in NAMES:
        layer, at = bank.layers[Target(f"{PREFIX}{name}.weight")], 0
        down, up = layer.pairs(bank.flat)
        scales = bank.scales[layer.row : layer.row + layer.rank]
        for each, (_, rank, alpha, _) in zip(pairs, FILES, strict=True):
            if name in each:
                rows, at = slice(at, at + rank), at + rank
                for part, found in zip(each[name], (up[:, rows], down[rows]), strict=True):
                    assert torch.equal(found, part.flatten(1).bfloat16())
                assert scales[rows].tolist() == [(alpha or rank) / rank] * rank
        assert layer.rank == len(down) == math.ceil(at / 8) * 8
        assert not any(part.any() for part in (down[at:], up[:, at:], scales[at:]))


def test_strengths_and_block_filters_scale_rows(stack):
    """The active rows are from the first active file to the last; a file can be there twice."""
    bank = load_bank(stack[1], TARGETS)
    layer = bank.layers[Target(f"{Q}.weight")]
    for entries, strengths, (one, two, three), rows in (
        (((0, ""), (1, ""), (2, "")), (0, -1, 2), (0, -1, 2), (4, 23)),
        (((0, ""), (1, ""), (2, "")), (1, 0, 0.5), (1, 0, 0.5), (0, 23)),
        (((0, "0-,1=0.5"), (1, "!1")), (2, 2), (1, 0, 0), (0, 4)),
        (((1, ""), (1, "1"), (1, "0")), (1, 0.25, 9), (0, 1.25, 0), (4, 7)),
        (((1, ""), (1, "1")), (1, -1), (0, 0, 0), (0, 0)),
    ):
        amounts = models.amounts_of(bank, *entries)
        amounts.set(strengths)
        found = amounts.flat[layer.row : layer.row + 23].tolist()
        assert found == [one * 0.5] * 4 + [two] * 3 + [three * 0.5] * 16
        assert [amounts.of(layer, file) for file in range(3)] == [one, two, three]
        assert amounts.rows(layer) == rows


def test_blocks_are_in_the_order_of_the_model_without_gaps(write):
    """In any order of the file."""
    shapes = wan(blocks=11, vace=1)
    path = write(spelled(random_pairs(shapes, reversed(modules(shapes)), 8)))
    bank = load_bank([path], Targets(shapes))
    found = bank.blocks()
    starts = [block.layers[0].at for block in found]
    ends = [*starts[1:], bank.flat.numel()]
    assert [block.pairs for block in found] == list(zip(starts, ends, strict=True))
    names = [{block_of(layer.target.key) for layer in block.layers} for block in found]
    blocks = [*(f"blocks.{number}" for number in range(11)), "vace_blocks.0"]
    assert [each for each in names if each != {""}] == [{name} for name in blocks]


def test_the_same_files_share_a_bank_in_use(stack):
    _, paths = stack
    bank = load_bank(paths, TARGETS)
    assert load_bank(list(map(str, paths)), Targets(dict(WAN))) is bank
    halves = {"q": Target(f"{Q}.weight", (0, 0, 8))}
    others = [
        load_bank(paths[:2], TARGETS),
        load_bank(paths[::-1], TARGETS),
        load_bank(paths, TARGETS, torch.bfloat16),
        load_bank(paths, Targets(wan(blocks=4))),
        load_bank(paths, Targets(WAN, more=halves)),
    ]
    for content in paths[:2]:  # another time, then another size
        paths[0].write_bytes(content.read_bytes())
        os.utime(paths[0], ns=(1, 1))
        others.append(load_bank(paths, TARGETS))
    assert len({bank, *others}) == 1 + len(others)
    gone = weakref.ref(bank)
    del bank
    gc.collect()
    assert gone() is None


def test_a_bank_that_cannot_be_read_is_not_cached(write):
    pairs = random_pairs(WAN, ATTENTION)
    paths = [write(spelled(pairs), f"{number}.safetensors") for number in (0, 1)]
    pairs["blocks.2.self_attn.v"][0][0, 0] = torch.nan
    good = paths[1].read_bytes()
    write(spelled(pairs), "1.safetensors")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.safetensors: .*blocks.2.self_attn.v.* finite"):
            load_bank(paths, TARGETS)
    paths[1].write_bytes(good)
    assert len(load_bank(paths, TARGETS).files) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the system counts no peak memory")
@pytest.mark.parametrize(
    "blocks",
    [3, pytest.param(40, marks=pytest.mark.slow)],  # 40: Wan 14B, files of 0.6 GB
)
def test_reading_takes_the_memory_of_the_bank_and_two_layers(tmp_path, blocks):
    measured = loading.measure(tmp_path, blocks)
    assert measured["bank"] == 3 * blocks * 64 * 2 * 2 * (8 * 5120 + 5120 + 13824)
    assert measured["peak"] <= measured["bank"] + 2 * measured["layer"]


# What is not a pair.


@pytest.fixture
def others(write):
    """Return a model, and a bank and tensors of DoRAs, differences, biases and modulations."""
    model = Model(Casting)
    tensors = {}
    for block in (f"blocks.{number}" for number in range(3)):
        tensors |= spelled(random_pairs(model.shapes(), [f"{block}.self_attn.q"]))
        tensors[f"{block}.self_attn.q.lora_magnitude_vector"] = torch.rand(16)
        tensors[f"{block}.self_attn.o.diff"] = torch.rand(16, 16).half()
        tensors[f"{block}.ffn.0.diff_b"] = torch.rand(24)
        tensors[f"{block}.diff_m"] = torch.rand(1, 6, 16)
    return model, load_bank([write(tensors)], Targets(model.shapes())), tensors


class NoHostReads(TorchDispatchMode):
    """Refuses operations that read the host's memory for a result on another device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "cpu":
            given = [each for each in args if isinstance(each, torch.Tensor) and each.ndim]
            assert not any(each.device.type == "cpu" for each in given), function
        return result


@pytest.mark.parametrize("mode", ["stream", "bypass"])
def test_nothing_is_copied_from_the_host_after_the_first_call(others, mode):
    """Once the bank is on the device, as ComfyUI loads it; the device here has no values."""
    model, bank, _ = others
    device, x = torch.device("meta"), video().to("meta")
    model.to(device)
    bank.to(device)
    session = session_of(bank, [0.5], mode)
    for check in (contextlib.nullcontext(), NoHostReads()):
        with check, torch.no_grad(), session.call(model, device):
            model(x)
    assert not session.counts.unserved


def test_a_bank_counts_and_moves_all_of_its_tensors(others):
    _, bank, tensors = others
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held <= bank.nbytes <= held + 16 * len(tensors)
    assert bank.nbytes == sum(value.nbytes for value in bank.state_dict().values())
    places = [value.data_ptr() for value in bank.parameters()]
    assert [value.data_ptr() for value in bank.copy().parameters()] == places


def test_a_buffer_is_kept_until_its_copy_is_done(write, monkeypatch):
    """The allocator knows of each copy, so a run that ends early frees nothing too soon."""
    bank = load_bank([write(spelled(random_pairs(WAN, ATTENTION)))], TARGETS)
    copied, recorded, stream = [], [], mock.MagicMock()
    new_empty, copy = torch.Tensor.new_empty, torch.Tensor.copy_

    def copy_(target, source, *, non_blocking=False):
        copied.extend([target.data_ptr()] * non_blocking)
        return copy(target, source)

    for name, function in {
        "new_empty": lambda tensor, count, **_: new_empty(tensor, count),
        "copy_": copy_,
        "record_stream": lambda tensor, _: recorded.append(tensor.data_ptr()),
    }.items():
        monkeypatch.setattr(torch.Tensor, name, function)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    loader = BankLoader(bank, torch.device("cuda", 0))
    for layer in bank.layers.values():
        loader.pairs(layer)
    assert len(copied) == 3 + 1
    assert recorded == copied
