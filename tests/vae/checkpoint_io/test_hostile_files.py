"""Untrusted files load or are refused in one line, with little memory and time, and run no code."""

import pickle

import pytest
import torch

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.hostile_files import (
    archive,
    call,
    hostile_files,
    name,
    noise,
    outcome,
    program,
    text,
)
from fast_video_vae.tests.lora.models import wan
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.media import load_latent
from fast_video_vae.vae.preview import load_tiny_decoder

# Kinds for the readers of latents and LoRAs too; the others are pickles, which these do not read.
FOR_ALL = ("mistaken", "headers", "layouts", "noise", "cut 1")
# Kinds that can be valid: flipped values, ignored fields of an archive, a wrong suffix.
MAY_LOAD = {"archives", "cut", "flipped", "mistaken"}


def outcomes(folder, files):
    """Yield kind and success of every file with every reader; an error must name the file."""
    targets = Targets(wan(blocks=1))
    others = [load_latent, lambda path: load_bank([path], targets), load_tiny_decoder]
    for file, content in files:
        path = folder / file
        path.write_bytes(content)
        size = len(content)
        del content
        for read in [lambda path: load_vae(path, dtype=torch.float32), *others]:
            if read not in others or file.startswith(FOR_ALL):
                found = outcome(read, path)
                assert found["bytes"] - size < 300 << 20, file
                assert found["seconds"] < 2, file
                if found["error"]:
                    check_line(found["error"], file)
                yield file.split()[0], found["error"] is None
        path.unlink()
    assert not list(folder.iterdir()), "code in a file was run"


def check_line(error, file):
    message = str(error)
    assert isinstance(error, ValueError | OSError), (file, error)
    assert message.isprintable(), message
    assert file in message, message
    # The error about a LoRA of another model lists its modules, so it can be longer.
    assert len(message) <= (700 if message.startswith("nothing in ") else 160), message


@pytest.mark.parametrize(
    ("every", "random", "files"), [(7, 8, 100), pytest.param(1, 2000, 2600, marks=pytest.mark.slow)]
)
def test_hostile_files_load_or_fail_in_one_line(tmp_path, every, random, files):
    hostile = [*hostile_files(tmp_path / "canary", every), *noise(random)]
    assert len(hostile) >= files
    found = set(outcomes(tmp_path, hostile))
    assert {kind for kind, loads in found if loads} <= MAY_LOAD
    assert {kind for kind, loads in found if not loads} == {
        "archives", "cut", "flipped", "headers", "layouts", "mistaken", "noise", "pickles",
        "tensors",
    }  # fmt: skip


def test_the_code_in_the_files_would_run(tmp_path):
    """The tests above rely on it: `pickle.loads` executes the code."""
    canary = tmp_path / "canary"
    data = program(call(name("builtins", "eval"), text(f"open({str(canary)!r}, 'w').close()")))
    assert archive(data)
    pickle.loads(data)
    assert canary.exists()
