"""Stacks of LoRAs in one block of memory: their sum, sharing and cost."""

import gc
import itertools
import os
import weakref

import pytest
import torch

from fast_video_vae.lora.bank import block_of, load_bank
from fast_video_vae.lora.keys import Target, Targets
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

WAN = wan(blocks=3)
TARGETS = Targets(WAN)
NAMES = modules(WAN)
ATTENTION = [name for name in NAMES if "self_attn" in name]
Q = f"{PREFIX}blocks.1.self_attn.q"


@pytest.fixture
def stack(write):
    """Return three (path, pairs, scale) of different modules, ranks, scales and dtypes."""
    made = []
    for number, (names, rank, alpha, dtype) in enumerate((
        (NAMES, 4, 2, torch.float32),
        (ATTENTION, 3, None, torch.float16),
        (NAMES[5:], 16, 8, torch.bfloat16),
    )):  # fmt: skip
        pairs = random_pairs(WAN, names, rank, seed=number, dtype=dtype)
        path = write(spelled(pairs, alpha=alpha), f"{number}.safetensors")
        made.append((path, pairs, (alpha or rank) / rank))
    return made


def delta(pairs, name):
    """Return `up @ down` in float64, flat."""
    if name not in pairs:
        return 0.0
    up, down = (part.double().flatten(1) for part in pairs[name])
    return up @ down


def test_joined_pairs_are_the_sum_of_all_files(stack):
    bank = load_bank([path for path, _, _ in stack], TARGETS)
    strengths = 0.7, -1.2, 2.0
    amounts = amounts_of(bank)
    amounts.set(strengths)
    assert len(bank.layers) == len(NAMES)
    for name in NAMES:
        layer = bank.layers[Target(f"{PREFIX}{name}.weight")]
        down, up = (part.double() for part in layer.pairs(bank.flat))
        factors = amounts.flat[layer.row : layer.row + layer.rank].double()
        expected = sum(
            strength * scale * delta(pairs, name)
            for strength, (_, pairs, scale) in zip(strengths, stack, strict=True)
        )
        # Pairs of half precision are exact in float32; the amounts are rounded to it.
        torch.testing.assert_close(up * factors @ down, expected, rtol=1e-6, atol=1e-5)


def test_rows_record_their_file_and_ranks_are_padded_with_zeros(stack):
    bank = load_bank([path for path, _, _ in stack], TARGETS)
    layer = bank.layers[Target(f"{Q}.weight")]
    assert layer.rows == {0: (0, 4), 1: (4, 7), 2: (7, 23)}
    assert layer.rank == 24
    down, up = layer.pairs(bank.flat)
    assert not down[23:].any()
    assert not up[:, 23:].any()
    amounts = amounts_of(bank)
    for strengths, rows in (
        ((1, 0, 0), (0, 4)), ((0, 1, 0), (4, 7)), ((1, 1, 0), (0, 7)), ((0, 1, 1), (4, 23)),
        ((1, 0, 1), (0, 23)), ((0, 0, 0), (0, 0)),  # from the first active file to the last
    ):  # fmt: skip
        amounts.set(strengths)
        assert amounts.rows(layer) == rows
    scales = bank.scales[layer.row : layer.row + layer.rank]
    assert scales.tolist() == [0.5] * 4 + [1.0] * 3 + [0.5] * 16 + [0.0]


@pytest.mark.parametrize(
    ("shapes", "blocks"),
    [(wan(blocks=12, i2v=False), 12), (wan(blocks=3, vace=2), 5), (qwen(blocks=3), 3)],
)
def test_layers_are_in_the_order_of_the_model_without_gaps(write, shapes, blocks):
    """In any order of the file; `Bank.blocks` gives one span to each block."""
    path = write(spelled(random_pairs(shapes, reversed(modules(shapes)), 8)))
    bank = load_bank([path], Targets(shapes))
    spans, at, row = [block.pairs for block in bank.blocks()], 0, 0
    for layer in bank.layers.values():
        assert (layer.at, layer.row) == (at, row)
        at, row = at + layer.numel, row + layer.rank
        assert sum(first <= layer.at and at <= last for first, last in spans) == 1, layer.target
    assert bank.flat.numel() == at == sum(last - first for first, last in spans)
    assert bank.scales.numel() == row
    found = filter(None, (block_of(target.key) for target in bank.layers))
    names = [name for name, _ in itertools.groupby(found)]
    assert len(names) == blocks < len(spans)  # layers outside the blocks have spans too
    assert names == sorted(names, key=lambda name: (name.split(".")[0], int(name.split(".")[1])))


def test_the_same_files_share_a_bank_in_use(stack):
    paths = [path for path, _, _ in stack]
    bank = load_bank(paths, TARGETS)
    assert load_bank(list(map(str, paths)), Targets(dict(WAN))) is bank
    assert load_bank(paths, TARGETS, torch.bfloat16) is not bank
    assert load_bank(paths[:2], TARGETS) is not bank
    assert load_bank(paths[::-1], TARGETS) is not bank
    gone = weakref.ref(bank)
    del bank
    gc.collect()
    assert gone() is None


def test_another_version_of_a_file_or_another_model_has_another_bank(write):
    path = write(spelled(random_pairs(WAN, ATTENTION)))
    bank = load_bank([path], TARGETS)
    assert load_bank([path], Targets(wan(blocks=4))) is not bank
    halves = {"q": Target(f"{Q}.weight", (0, 0, 8))}
    assert load_bank([path], Targets(WAN, more=halves)) is not bank
    os.utime(path, ns=(1, 1))
    touched = load_bank([path], TARGETS)
    assert touched is not bank
    assert torch.equal(touched.flat, bank.flat)
    write(spelled(random_pairs(WAN, NAMES, seed=1)))
    os.utime(path, ns=(1, 1))
    assert load_bank([path], TARGETS) is not touched


def test_a_bank_that_cannot_be_read_is_not_cached(write):
    good = write(spelled(random_pairs(WAN, ATTENTION)))
    pairs = random_pairs(WAN, ATTENTION)
    pairs["blocks.2.self_attn.v"][0][0, 0] = torch.nan
    bad = write(spelled(pairs), "1.safetensors")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.safetensors: .*blocks.2.self_attn.v.* finite"):
            load_bank([good, bad], TARGETS)
    pairs["blocks.2.self_attn.v"][0][0, 0] = 0
    assert write(spelled(pairs), "1.safetensors") == bad
    assert load_bank([good, bad], TARGETS).files[1].path == str(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pairs_have_the_dtype_of_the_computation(stack, dtype):
    bank = load_bank([path for path, _, _ in stack], TARGETS, dtype)
    assert bank.flat.dtype == dtype
    assert bank.nbytes == bank.flat.numel() * dtype.itemsize
    up = bank.layers[Target(f"{Q}.weight")].pairs(bank.flat)[1]
    assert torch.equal(up[:, :4], stack[0][1]["blocks.1.self_attn.q"][0].to(dtype))


def test_a_mismatch_found_on_reading_is_reported(write):
    tensors = spelled(random_pairs(WAN, ATTENTION))
    tensors |= {f"{PREFIX}blocks.0.ffn.0.lokr_w1": torch.ones(4, 4),
                f"{PREFIX}blocks.0.ffn.0.lokr_w2": torch.ones(4, 4)}  # fmt: skip
    bank = load_bank([write(tensors)], TARGETS)
    assert bank.reports[0].used == 2 * len(ATTENTION)
    (line,) = bank.reports[0].lines()[1:]
    assert line.startswith("  2 keys do not fit: ")
    assert "16x16" in line


# Amounts.


def test_a_block_filter_scales_the_rows_of_blocks(stack):
    bank = load_bank([stack[0][0]], TARGETS)
    amounts = amounts_of(bank, (0, "0-,1=0.5,!2"))
    amounts.set([2.0])
    for name, factor in (("blocks.0", 1.0), ("blocks.1", 0.5), ("blocks.2", 0.0)):
        layer = bank.layers[Target(f"{PREFIX}{name}.self_attn.q.weight")]
        assert amounts.of(layer, 0) == 2 * factor
        rows = amounts.flat[layer.row : layer.row + 4]
        assert rows.tolist() == [2 * factor * 0.5] * 4
        assert amounts.rows(layer) == ((0, 4) if factor else (0, 0))
    # Strengths of a file that is listed twice add up.
    amounts, layer = amounts_of(bank, (0, ""), (0, "1")), bank.layers[Target(f"{Q}.weight")]
    for strengths, total in (((1.0, 0.25), 1.25), ((1.0, -1.0), 0.0)):
        amounts.set(strengths)
        assert amounts.of(layer, 0) == total
        assert amounts.flat[layer.row : layer.row + 4].tolist() == [total * 0.5] * 4
    assert amounts.rows(layer) == (0, 0)


# Memory, in a separate process.


@pytest.mark.skipif(
    not loading.can_measure(), reason="the system does not report the peak memory of a process"
)
@pytest.mark.parametrize(
    "blocks",
    [3, pytest.param(40, marks=pytest.mark.slow)],  # 40: Wan 14B, files of 0.6 GB
)
def test_reading_takes_the_memory_of_the_bank_and_two_layers(tmp_path, blocks):
    measured = loading.measure(tmp_path, blocks)
    for path in tmp_path.iterdir():
        path.unlink()
    assert measured["bank"] == 3 * blocks * 64 * 2 * 2 * (8 * 5120 + 5120 + 13824)
    assert measured["peak"] <= measured["bank"] + 2 * measured["layer"]
