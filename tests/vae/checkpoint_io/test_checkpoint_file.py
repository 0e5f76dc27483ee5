"""Checkpoint files: any name, any content that training saves, and no tensors without data."""

import logging
import os
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict, refused
from fast_video_vae.vae import load_vae


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *(("safetensors", suffix) for suffix in (".SAFETENSORS", ".pth", "")),
        *(("zip", suffix) for suffix in (".pt", ".txt", ".safetensors")),
        *(("legacy", suffix) for suffix in (".PTH", "")),
    ],
)
def test_the_suffix_of_a_file_is_ignored(tmp_path, kind, suffix):
    small = random_state_dict(2)
    path = tmp_path / f"vae{suffix}"
    if kind == "safetensors":
        save_file(small, path)
    else:
        torch.save(small, path, _use_new_zipfile_serialization=kind == "zip")
    for given in (path, str(path)):
        loaded = load_vae(given, dtype=torch.float32).state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in small.items())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_folders_and_pipes_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe.pth", "a device")):
        with refused(f"is {what}; expected a .safetensors or .pth", path.name):
            load_vae(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("n" * 251 + ".pth", "nnn...nnn"), ("a\nb\u202e.pth", "a\\nb\\u202e.pth")],
)
def test_a_long_or_odd_name_leaves_room_for_the_reason(tmp_path, name, expected):
    path = tmp_path / name
    path.write_bytes(b"")
    with refused("is empty, not a complete", expected):
        load_vae(path)


# Content that training saves.


def _tagged(value):
    parameter = torch.nn.Parameter(value.clone())
    parameter.tag = "x"
    return parameter


class _Net(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.leaves = torch.nn.ParameterDict({"a": torch.ones(1)})
        self.state = state

    def state_dict(self):
        saved = super().state_dict()  # has the versions of the modules as attributes
        saved.clear()
        saved.update(self.state)
        return saved


SAVED = {
    "parameters": lambda state: {key: torch.nn.Parameter(value) for key, value in state.items()},
    "of a module": lambda state: _Net(state).state_dict(),
    "views": lambda state: {key: torch.stack([value, value])[1] for key, value in state.items()},
    "channels last": lambda state: {
        key: value.to(memory_format=torch.channels_last_3d) if value.ndim == 5 else value
        for key, value in state.items()
    },
    "float8": lambda state: {key: value.to(torch.float8_e5m2) for key, value in state.items()},
    "training": lambda state: {
        "state_dict": state, "epoch": 3, "loss": 0.5, "name": "x", "done": False, "none": None,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "avg": torch.ones(2)}},
        "lr": [1e-4]}, "counts": Counter("aab"),
        "size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"),
        "seed": [1 << 70] * 2000, "tags": {*map(str, range(9000))}, "raw": bytes(300_000),
        "betas": (0.9, 0.99), "attributes": _tagged(torch.ones(2)), "z": 1 + 2j,
    },
}  # fmt: skip


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_saved_by_training_load(tmp_path, saved, zipped):
    small = random_state_dict(2)
    path = tmp_path / "vae.pth"
    torch.save(SAVED[saved](small), path, _use_new_zipfile_serialization=zipped)
    if saved == "float8" and not zipped:  # PyTorch does not read what it writes
        with refused("PyTorch cannot read it", "vae.pth"):
            load_vae(path)
        return
    dtype = torch.float8_e5m2 if saved == "float8" else torch.float32
    loaded = load_vae(path, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value.to(dtype).float()) for key, value in small.items())


def test_tied_weights_load_from_pickle_protocol_3(tmp_path):
    small = random_state_dict(2)
    small["decoder.middle.2.residual.2.weight"] = small["decoder.middle.0.residual.2.weight"]
    torch.save(small, tmp_path / "vae.pth", pickle_protocol=3)
    loaded = load_vae(tmp_path / "vae.pth", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in small.items())


# Tensors without data.


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
@pytest.mark.parametrize("source", ["state dict", "zip", "legacy"])
def test_tensors_without_their_own_data_are_refused(tmp_path, kind, source):
    make, words = UNREAL[kind]
    small = random_state_dict(2)
    key = "decoder.conv1.weight"
    small[key] = make(small[key])
    given = small
    if source != "state dict":
        given = tmp_path / "vae.pth"
        torch.save(small, given, _use_new_zipfile_serialization=source == "zip")
    # Functions that create such tensors are refused with the file, before it is read.
    named = [key] if source == "state dict" or kind in ("expanded", "empty") else []
    with refused(words, "state dict" if source == "state dict" else "vae.pth", *named):
        load_vae(given)


def test_an_encoder_of_one_latent_logs_a_warning(caplog):
    small = random_state_dict(2)
    small["conv1.weight"] = torch.zeros_like(small["conv1.weight"])
    with caplog.at_level(logging.WARNING):
        load_vae(small)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "conv1.weight (quant_conv) is all zeros" in caplog.text
