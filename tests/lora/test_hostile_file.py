"""LoRA files that are mistaken or made to harm: one line each, with the name, and soon."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.file import LoraFile
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora.models import random_pairs, spelled, wan

TARGETS = Targets(wan(blocks=1))
STEM = "diffusion_model.blocks.0.self_attn.q"
PAIR = {f"{STEM}.lora_A.weight": torch.ones(2, 16), f"{STEM}.lora_B.weight": torch.ones(16, 2)}


def refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_bank([path], TARGETS)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) <= 300
    assert path.name in text
    return text


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html><html>404</html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a git-lfs pointer"),
        (b"Not found", "a text"),
        (bytes(5000), "filled with zeros"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_kind(tmp_path, content, kind):
    path = tmp_path / "some.safetensors"
    path.write_bytes(content)
    refused(path, f"is not a whole safetensors file: it is {kind}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "is a device; expected a .safetensors file")


@pytest.mark.parametrize(
    ("up", "down"),
    [((), (2, 16)), ((16, 2), ()), ((), ()), ((16,), (16,)), ((16, 0), (0, 16)), ((0, 2), (2, 16))],
)
def test_pairs_of_odd_shapes_are_refused(tmp_path, up, down):
    parts = {f"{STEM}.lora_A.weight": torch.ones(down), f"{STEM}.lora_B.weight": torch.ones(up)}
    save_file(parts, tmp_path / "some.safetensors")
    refused(tmp_path / "some.safetensors", "some")


@pytest.mark.parametrize("part", PAIR)
def test_half_a_pair_is_refused_where_metadata_has_an_alpha(tmp_path, part):
    save_file({part: PAIR[part]}, tmp_path / "some.safetensors", {"lora_alpha": "8"})
    refused(tmp_path / "some.safetensors", "expected all of them")


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_adapter_metadata": "[" * 100_000},
        {"adapter_config": json.dumps({"lora_alpha": [1]})},
        {"peft_config": '{"lora_alpha": 1' + "0" * 400 + "}"},
    ],
)
def test_metadata_that_says_nothing_is_passed_over(tmp_path, metadata):
    save_file(PAIR, tmp_path / "some.safetensors", metadata)
    assert len(LoraFile(tmp_path / "some.safetensors", TARGETS).entries) == 1


def test_keys_are_shown_escaped_and_short(tmp_path):
    nasty = {"a\nb": torch.ones(1), "\u202egnp": torch.ones(1), "k" * 999: torch.ones(1)}
    save_file(nasty, tmp_path / "some.safetensors")
    refused(tmp_path / "some.safetensors", r"it has (a\\nb|\\u202egnp|kkk)")
    save_file(PAIR | nasty, tmp_path / "some.safetensors")
    for line in LoraFile(tmp_path / "some.safetensors", TARGETS).report.lines():
        assert line.isprintable()
        assert len(line) < 300


def test_a_report_on_pairs_of_any_number_of_shapes_is_short(tmp_path):
    shapes = wan(blocks=20)
    pairs = random_pairs(shapes, [f"blocks.{n}.self_attn.q" for n in range(20)])
    odd = {
        key: torch.ones(n + 17, 4) if key.endswith("lora_B.weight") else value
        for n, (key, value) in enumerate(spelled(pairs).items())
        if ".0." not in key
    }
    save_file(PAIR | odd, tmp_path / "some.safetensors")
    lines = LoraFile(tmp_path / "some.safetensors", Targets(shapes)).report.lines()
    assert len(lines) == 7
    assert lines[-1] == "  28 more keys do not fit"


def test_a_key_of_nothing_but_prefixes_takes_no_time(tmp_path):
    keys = {f"{'model.' * 150}{n}.lora_A.weight": torch.ones(1) for n in range(2000)}
    save_file(PAIR | keys, tmp_path / "some.safetensors")
    began = time.process_time()
    assert len(LoraFile(tmp_path / "some.safetensors", TARGETS).entries) == 1
    assert time.process_time() - began < 1
