"""Unusable or malicious LoRA files are a one-line error with the file's name, without delay.

`vae/checkpoint_io/test_hostile_files.py` has the files that are the same for every reader.
"""

import json
import math
import os
import time

import pytest
import torch
from safetensors.torch import save, save_file

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.file import LoraFile
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora.models import PREFIX, modules, qwen, random_pairs, spelled, wan

TARGETS = Targets(wan(blocks=1))
STEM = f"{PREFIX}blocks.0.self_attn.q"
DOWN, UP = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"


def pair(up=(16, 2), down=(2, 16), dtype=torch.float32):
    return {DOWN: torch.ones(down, dtype=dtype), UP: torch.ones(up, dtype=dtype)}


def two_pairs(seed=0):
    shapes = wan(blocks=1)
    return spelled(random_pairs(shapes, [f"blocks.0.self_attn.{name}" for name in "qk"], seed=seed))


def whole_model(shapes):
    return spelled(random_pairs(shapes, modules(shapes)))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.safetensors"


def refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_bank([path], TARGETS)
    text = str(caught.value)
    assert text.isprintable()
    # The module names of a LoRA show which model it is for, so this error may be longer.
    assert len(text) <= (700 if text.startswith("nothing in ") else 160)
    assert path.name in text
    return text


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (pair() | {UP: torch.full((16, 2), math.nan)}, "self_attn.q.* expected finite numbers"),
        (pair(dtype=torch.int64), "expected floating point"),
        (pair(dtype=torch.bool), "expected floating point"),
        (pair(dtype=torch.complex64), "expected floating point"),
        (pair() | {f"{STEM}.alpha": torch.tensor(math.nan)}, "alpha is nan"),
        (pair((16, 4), (5, 16)), "up has rank 4, down has rank 5; expected the same rank"),
        ({DOWN: torch.ones(2, 16)}, "expected all of them"),
        ({UP: torch.ones(16, 2)}, "expected all of them"),
        *((pair(up, down), "some") for up, down in (
            ((), (2, 16)), ((16, 2), ()), ((), ()), ((16,), (16,)), ((16, 0), (0, 16)),
            ((0, 2), (2, 16)),
        )),
        ({}, "it has no keys"),
        ({"conv.weight": torch.ones(2)}, "it has conv.weight; the model has"),
        ({f"{STEM}.diff": torch.ones(4, 4)}, "a difference of 4x4 for a parameter of 16x16"),
        (
            whole_model(wan(d=32, f=48, i2v=False)),
            r"for another model: a pair for \d+x\d+ and a parameter of",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_unusable_file_is_refused(path, tensors, match):
    save_file(tensors, path, {"lora_alpha": "8"})  # does not make up for half a pair
    refused(path, match)


def test_the_error_for_another_model_shows_five_keys_of_each_side(path):
    shapes = qwen()
    names = [name for name in modules(shapes) if "blocks" in name]
    save_file(spelled(random_pairs(shapes, names)), path)
    text = refused(path, r"nothing in some\.safetensors is for this model")
    theirs, ours = text.split("; the model has ")
    assert theirs.count("transformer_blocks") == 5
    assert theirs.count(", ") == 4
    assert ours.split(", ") == [f"{PREFIX}{name}" for name in (
        "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0",
        "time_embedding.2",
    )]  # fmt: skip


@pytest.mark.parametrize("size", [0x280, 0x380, 0x480, 0x580])
def test_a_header_length_like_a_pickle_is_read_as_safetensors(path, size):
    data = save(pair())
    header = 8 + int.from_bytes(data[:8], "little")
    text = data[8:header].ljust(size)
    path.write_bytes(size.to_bytes(8, "little") + text + data[header:])
    assert len(load_bank([path], TARGETS).layers) == 1


def test_a_directory_and_a_missing_file_are_refused(path):
    refused(path, "cannot be read: No such file")
    path.mkdir()
    refused(path, "cannot be read: Is a directory")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_refused_at_once(path):
    os.mkfifo(path)
    refused(path, "is a device; expected a .safetensors file")


def replaced(path, tensors):
    """Replace the file by another one of the same name, atomically."""
    other = path.with_name("other")
    save_file(tensors, other)
    os.utime(other, ns=(1, 1))
    other.replace(path)


def overwritten(path, tensors):
    """Overwrite the bytes of the file in place."""
    path.write_bytes(save(tensors))
    os.utime(path, ns=(1, 1))


def removed(path, tensors):
    path.unlink()


def shortened(path, tensors):
    os.truncate(path, 100)


@pytest.mark.parametrize("change", [replaced, overwritten, removed, shortened])
@pytest.mark.parametrize("pairs_read", [0, 1])
def test_a_file_that_changes_between_its_header_and_a_pair_is_refused(path, change, pairs_read):
    save_file(two_pairs(), path)
    file = LoraFile(path, TARGETS)
    for entry in file.entries[:pairs_read]:
        file.read(entry)
    change(path, two_pairs(seed=1))
    with pytest.raises(ValueError, match=r"some\.safetensors (was replaced|cannot be read)"):
        file.read(file.entries[pairs_read])


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_adapter_metadata": "[" * 100_000},
        {"adapter_config": json.dumps({"lora_alpha": [1]})},
        {"peft_config": '{"lora_alpha": 1' + "0" * 400 + "}"},
    ],
)
def test_invalid_metadata_is_ignored(path, metadata):
    save_file(pair(), path, metadata)
    assert len(LoraFile(path, TARGETS).entries) == 1


def test_keys_are_shown_escaped_and_short(path):
    nasty = {"a\nb": torch.ones(1), "\u202egnp": torch.ones(1), "k" * 999: torch.ones(1)}
    save_file(nasty, path)
    assert len(refused(path, r"it has (a\\nb|\\u202egnp|kkk)")) <= 160
    save_file(pair() | nasty, path)
    for line in LoraFile(path, TARGETS).report.lines():
        assert line.isprintable()
        assert len(line) < 160


def test_a_report_on_many_shapes_is_short(path):
    shapes = wan(blocks=20)
    pairs = random_pairs(shapes, [f"blocks.{n}.self_attn.q" for n in range(20)])
    odd = {
        key: torch.ones(n + 17, 4) if key.endswith("lora_B.weight") else value
        for n, (key, value) in enumerate(spelled(pairs).items())
        if ".0." not in key
    }
    save_file(pair() | odd, path)
    lines = LoraFile(path, Targets(shapes)).report.lines()
    assert len(lines) == 7
    assert lines[-1] == "  28 more keys do not fit"


def test_a_key_of_many_prefixes_is_parsed_fast(path):
    """In a time that grows with the prefixes, not with their square."""
    seconds = []
    for prefixes in (15, 15, 150):
        keys = {f"{'model.' * prefixes}{n}.lora_A.weight": torch.ones(1) for n in range(2000)}
        save_file(pair() | keys, path)
        began = time.process_time()
        assert len(LoraFile(path, TARGETS).entries) == 1
        seconds.append(time.process_time() - began)
    assert seconds[2] < 25 * min(seconds)
