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


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("safetensors", ".SAFETENSORS"), ("safetensors", ".pth"), ("zip", ".safetensors"),
     ("zip", ".txt"), ("legacy", "")],
)  # fmt: skip
def test_the_suffix_of_a_file_is_ignored(tmp_path, small, kind, suffix):
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


def _tagged(value):
    parameter = torch.nn.Parameter(value.clone())
    parameter.tag = "x"
    return parameter


SAVED = {
    "parameters": lambda state: {key: torch.nn.Parameter(value) for key, value in state.items()},
    "views": lambda state: {key: torch.stack([value, value])[1] for key, value in state.items()},
    "channels last": lambda state: {
        key: value.to(memory_format=torch.channels_last_3d) if value.ndim == 5 else value
        for key, value in state.items()
    },
    "training": lambda state: {
        "state_dict": state, "epoch": 3, "loss": 0.5, "name": "x", "done": False, "none": None,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "avg": torch.ones(2)}},
        "lr": [1e-4]}, "counts": Counter("aab"),
        "size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"),
        "seed": [1 << 70] * 2000, "tags": {*map(str, range(9000))}, "raw": bytes(300_000),
        "betas": (0.9, 0.99), "attributes": _tagged(torch.ones(2)), "z": 1 + 2j,
    },
}  # fmt: skip


@pytest.mark.parametrize("content", SAVED)
def test_files_saved_by_training_load(tmp_path, small, content):
    for kind in ("zip", "legacy"):
        check_loads(saved(SAVED[content](small), tmp_path / "vae.pth", kind), small)


def test_tied_weights_load_from_pickle_protocol_3(tmp_path, small):
    small["decoder.middle.2.residual.2.weight"] = small["decoder.middle.0.residual.2.weight"]
    torch.save(small, tmp_path / "vae.pth", pickle_protocol=3)
    check_loads(tmp_path / "vae.pth", small)


UNREAL = {
    "meta": (lambda value: value.to("meta"), "meta"),
    "sparse": (lambda value: value.to_sparse(), "sparse"),
    "expanded": (lambda value: value[:1].expand(value.shape), "expanded|has only 432 values"),
    "empty": (lambda value: value[:0], "holds nothing|no size of 0"),
    "quantised": (
        lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        "quantised|qtensor|QInt8Storage",
    ),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings about some of these tensors
@pytest.mark.parametrize("kind", UNREAL)
def test_tensors_without_their_own_data_are_refused(tmp_path, small, kind):
    make, words = UNREAL[kind]
    small[KEY] = make(small[KEY])
    with refused(words, "state dict", KEY):
        load_vae(small)
    # Functions that create such tensors are refused with the file, before it is read.
    named = [KEY] if kind in ("expanded", "empty") else []
    with refused(words, "vae.pth", *named):
        load_vae(saved(small, tmp_path / "vae.pth", "zip"))


def test_an_encoder_of_one_latent_logs_a_warning(caplog, small):
    small["conv1.weight"] = torch.zeros_like(small["conv1.weight"])
    with caplog.at_level(logging.WARNING):
        load_vae(small)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "conv1.weight (quant_conv) is all zeros" in caplog.text
