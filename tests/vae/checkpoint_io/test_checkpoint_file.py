"""Checkpoint files: any name, any content that training saves, and no tensors without data."""

import logging
import os
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.vae import load_vae

KEY = "decoder.conv1.weight"


@pytest.fixture
def small():
    return random_state_dict(2)


def saved(content, path, kind):
    if kind == "safetensors":
        save_file(content, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def check_loads(given, expected):
    loaded = load_vae(given, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_the_suffix_of_a_file_is_ignored(tmp_path, small):
    for kind, suffix in ("safetensors", ".pth"), ("zip", ".safetensors"), ("legacy", ""):
        path = saved(small, tmp_path / f"vae{suffix}", kind)
        check_loads(path, small)
        check_loads(str(path), small)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_folders_and_pipes_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe.pth", "a device")):
        with refused(f"is {what}; expected a .safetensors or .pth", path.name):
            load_vae(path)


def test_a_long_or_odd_name_leaves_room_for_the_reason(tmp_path):
    for name, shown in (("n" * 251 + ".pth", "nnn...nnn"), ("a\nb\u202e.pth", "a\\nb\\u202e.pth")):
        (tmp_path / name).write_bytes(b"")
        with refused("is empty, not a complete", shown):
            load_vae(tmp_path / name)


def test_files_saved_by_training_load(tmp_path, small):
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.tag = "x"
    makes = (
        torch.nn.Parameter,
        lambda value: torch.stack([value, value])[1],  # a view
        lambda value: value.movedim(1, -1).contiguous().movedim(-1, 1) if value.ndim > 1 else value,
    )
    contents = [{key: make(value) for key, value in small.items()} for make in makes]
    contents.append({
        "state_dict": small, "epoch": 3, "loss": 0.5, "name": "x", "done": False, "none": None,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "avg": torch.ones(2)}},
        "lr": [1e-4]}, "counts": Counter("aab"),
        "size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"),
        "seed": [1 << 70] * 2000, "tags": {*map(str, range(9000))}, "raw": bytes(300_000),
        "betas": (0.9, 0.99), "attributes": tagged, "z": 1 + 2j,
    })  # fmt: skip
    for content in contents:
        for kind in ("zip", "legacy"):
            check_loads(saved(content, tmp_path / "vae.pth", kind), small)
    small["decoder.middle.2.residual.2.weight"] = small["decoder.middle.0.residual.2.weight"]
    torch.save(small, tmp_path / "vae.pth", pickle_protocol=3)
    check_loads(tmp_path / "vae.pth", small)  # with tied weights


def quantised(value):
    return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings about some of these tensors
@pytest.mark.parametrize(
    ("make", "words", "named"),
    [
        (lambda value: value.to("meta"), "meta", ()),
        (lambda value: value.to_sparse(), "sparse", ()),
        (lambda value: value[:1].expand(value.shape), "expanded|has only 432 values", (KEY,)),
        (lambda value: value[:0], "holds nothing|no size of 0", (KEY,)),
        (quantised, "quantised|qtensor|QInt8Storage", ()),
    ],
)
def test_tensors_without_their_own_data_are_refused(tmp_path, small, make, words, named):
    small[KEY] = make(small[KEY])
    with refused(words, "state dict", KEY):
        load_vae(small)
    # Functions that create such tensors are refused with the file, before it is read.
    with refused(words, "vae.pth", *named):
        load_vae(saved(small, tmp_path / "vae.pth", "zip"))


def test_an_encoder_of_one_latent_logs_a_warning(caplog, small):
    small["conv1.weight"] = torch.zeros_like(small["conv1.weight"])
    with caplog.at_level(logging.WARNING):
        load_vae(small)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "conv1.weight (quant_conv) is all zeros" in caplog.text
