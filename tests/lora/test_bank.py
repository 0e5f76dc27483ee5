"""Stacks of LoRAs in one block of memory: their rows, sharing, memory and copies."""

import gc
import math
import os
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.lora.bank import block_of, load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.offload import BankLoader
from fast_video_vae.tests.lora import loading
from fast_video_vae.tests.lora.models import (
    PREFIX,
    amounts_of,
    modules,
    qwen,
    random_pairs,
    spelled,
    wan,
)
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
ROWS = (0, 4), (4, 7), (7, 23)  # of self attention


@pytest.fixture
def stack(write):
    """Return the pairs and the paths of `FILES`."""
    pairs, paths = [], []
    for names, rank, alpha, dtype in FILES:
        pairs.append(random_pairs(WAN, names, rank, seed=rank, dtype=dtype))
        paths.append(write(spelled(pairs[-1], alpha=alpha), f"{rank}.safetensors"))
    return pairs, paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_pairs_of_all_files_padded_with_zeros(stack, dtype):
    """Of any dtype in that of the computation, and of convolutions too."""
    pairs, paths = stack
    bank = load_bank(paths, TARGETS, dtype)
    assert len(bank.layers) == len(NAMES)
    for name in NAMES:
        layer, at = bank.layers[Target(f"{PREFIX}{name}.weight")], 0
        down, up = layer.pairs(bank.flat)
        scales = bank.scales[layer.row : layer.row + layer.rank]
        for each, (_, rank, alpha, _) in zip(pairs, FILES, strict=True):
            if name in each:
                rows, at = slice(at, at + rank), at + rank
                for part, found in zip(each[name], (up[:, rows], down[rows]), strict=True):
                    assert torch.equal(found, part.flatten(1).to(dtype))
                assert scales[rows].tolist() == [(alpha or rank) / rank] * rank
        assert layer.rank == len(down) == math.ceil(at / 8) * 8
        assert not any(part.any() for part in (down[at:], up[:, at:], scales[at:]))


ALL = ((0, ""), (1, ""), (2, ""))
TWICE = ((1, ""), (1, "1"))  # strengths of a file add up


@pytest.mark.parametrize(
    ("entries", "strengths", "block", "factors", "rows"),
    [
        # From the first active file to the last.
        (ALL, (1.0, 0.0, 0.0), 1, (1, 0, 0), (0, 4)),
        (ALL, (0.0, -1.0, 2.0), 1, (0, -1, 2), (4, 23)),
        (ALL, (1.0, 0.0, 0.5), 1, (1, 0, 0.5), (0, 23)),
        (((0, "0-,1=0.5,!2"),), (2.0,), 0, (2, 0, 0), (0, 4)),
        (((0, "0-,1=0.5,!2"),), (2.0,), 1, (1, 0, 0), (0, 4)),
        (((0, "0-,1=0.5,!2"),), (2.0,), 2, (0, 0, 0), (0, 0)),
        (TWICE, (1.0, 0.25), 0, (0, 1, 0), (4, 7)),
        (TWICE, (1.0, 0.25), 1, (0, 1.25, 0), (4, 7)),
        (TWICE, (1.0, -1.0), 1, (0, 0, 0), (0, 0)),
    ],
)
def test_strengths_and_block_filters_scale_rows(stack, entries, strengths, block, factors, rows):
    bank = load_bank(stack[1], TARGETS)
    layer = bank.layers[Target(f"{PREFIX}blocks.{block}.self_attn.q.weight")]
    amounts = amounts_of(bank, *entries)
    amounts.set(strengths)
    assert tuple(amounts.of(layer, file) for file in range(3)) == factors
    assert amounts.rows(layer) == rows
    for factor, scale, (first, last) in zip(factors, (0.5, 1, 0.5), ROWS, strict=True):
        found = amounts.flat[layer.row + first : layer.row + last]
        assert found.tolist() == [factor * scale] * (last - first)


@pytest.mark.parametrize(
    ("shapes", "blocks"),
    [
        (wan(blocks=11, vace=2), {"blocks": 11, "vace_blocks": 2}),
        (qwen(), {"transformer_blocks": 2}),
    ],
)
def test_layers_are_in_the_order_of_the_model_without_gaps(write, shapes, blocks):
    """In any order of the file; `Bank.blocks` gives one span to each block."""
    path = write(spelled(random_pairs(shapes, reversed(modules(shapes)), 8)))
    bank = load_bank([path], Targets(shapes))
    at = row = 0
    for layer in bank.layers.values():
        assert (layer.at, layer.row) == (at, row)
        at, row = at + layer.numel, row + layer.rank
    assert (bank.flat.numel(), bank.scales.numel()) == (at, row)
    spans = [block.pairs for block in bank.blocks()]
    assert spans == [
        (block.layers[0].at, block.layers[-1].at + block.layers[-1].numel)
        for block in bank.blocks()
    ]
    names = [{block_of(layer.target.key) for layer in block.layers} for block in bank.blocks()]
    assert [each for each in names if each != {""}] == [
        {f"{kind}.{number}"} for kind, count in blocks.items() for number in range(count)
    ]


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


@pytest.mark.skipif(
    not loading.can_measure(), reason="the system does not report the peak memory of a process"
)
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
    model = Model(Casting, blocks=4)
    tensors = {}
    for block in (f"blocks.{number}" for number in range(4)):
        tensors |= spelled(random_pairs(model.shapes(), [f"{block}.self_attn.q"]))
        tensors[f"{block}.self_attn.q.dora_scale"] = torch.rand(16, 1)
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
    with torch.no_grad(), session.call(model, device):
        model(x)
    with NoHostReads(), torch.no_grad(), session.call(model, device):
        model(x)
    assert not session.counts.unserved


def test_a_bank_counts_and_moves_all_of_its_tensors(others):
    _, bank, tensors = others
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held <= bank.nbytes <= held + 16 * len(tensors)
    assert bank.nbytes == sum(value.nbytes for value in bank.state_dict().values())
    places = {name: value.data_ptr() for name, value in bank.named_parameters()}
    copy = bank.copy().named_parameters()
    assert {name: value.data_ptr() for name, value in copy} == places


def test_a_buffer_is_kept_until_its_copy_is_done(others, monkeypatch):
    """The allocator knows of each copy, so a run that ends early frees nothing too soon."""
    _, bank, _ = others
    copied, recorded, stream = [], [], mock.MagicMock()
    new_empty, copy = torch.Tensor.new_empty, torch.Tensor.copy_

    def copy_(target, source, *, non_blocking=False):
        if non_blocking:
            copied.append(target.data_ptr())
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
        loader.adapters(layer)
    assert len(copied) == 4 + 1
    assert recorded == copied
