"""The layers in int8 are chosen in the background, once for the weights, and kept on disk."""

import json
import threading

import pytest
import torch

from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.vae.families import STATES, latent_for, prepared
from fast_video_vae.tests.vae.streaming.test_int8 import warnings_of
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.streaming.int8 import layers, settings

BEGINS = "int8 begins with a later decode: its layers are being chosen in the background"


def new_vae(**options):
    return load_vae(STATES["wan2.1"](), dtype=torch.float32, **options)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The measured frames are small."""
    monkeypatch.setattr(settings, "_PIXELS", 16)


@pytest.fixture
def latent(int8):
    return latent_for(new_vae(), 2, 16, 16)


@pytest.fixture
def held(int8, monkeypatch):
    """The choice waits until the event is set."""
    go, choose = threading.Event(), layers.choose

    def late(*arguments):
        assert go.wait(60)
        return choose(*arguments)

    monkeypatch.setattr(layers, "choose", late)
    yield go
    go.set()


@pytest.fixture
def counted(int8, monkeypatch):
    """The choices that are measured."""
    made, choose = [], layers.choose

    def noted(*arguments):
        made.append(arguments[2])
        return choose(*arguments)

    monkeypatch.setattr(layers, "choose", noted)
    return made


def restart(int8, monkeypatch):
    """Begin as in a new process, which reads the file."""
    again = facts.Facts(int8.path, {})
    monkeypatch.setattr(layers, "facts_of", lambda device: again)


def test_a_decode_before_the_choice_is_that_of_auto_and_later_ones_are_in_int8(
    latent, held, products, caplog
):
    expected = new_vae().decode(latent)
    vae = new_vae(precision="int8")
    for _ in range(2):
        assert torch.equal(vae.decode(latent), expected)
    assert not products
    assert [line for line in warnings_of(caplog) if "int8" in line] == [f"Fast Video VAE: {BEGINS}"]
    assert not vae.wait_until_prepared(0.01)
    held.set()
    assert not torch.equal(prepared(vae).decode(latent), expected)
    assert products


def test_the_same_weights_are_measured_once_also_by_later_processes(
    latent, int8, counted, monkeypatch
):
    first = prepared(new_vae(precision="int8"))
    expected, rows = first.decode(latent), first.int8_layers(torch.float32).rows
    assert len(counted) == 1
    prepared(new_vae(precision="int8"))
    restart(int8, monkeypatch)
    vae = new_vae()
    vae._precision = "int8"  # without the background
    assert torch.equal(vae.decode(latent), expected)
    assert vae.int8_layers(torch.float32).rows == rows
    assert len(counted) == 1


def test_a_damaged_file_is_measured_again(int8, counted, monkeypatch):
    prepared(new_vae(precision="int8"))
    ((_, rows),) = json.loads(int8.path.read_text())["facts"].items()
    names = [row[0] for row in rows]
    assert [list(row) for row in layers._read(rows, names).rows] == rows
    for damaged in (
        [["middle.9.residual.2", *rows[0][1:]], *rows[1:]],
        [[rows[0][0], "0.1", *rows[0][2:]], *rows[1:]],
    ):
        assert layers._read(damaged, names) is None
    int8.path.write_text("{")
    for _ in range(2):
        restart(int8, monkeypatch)
        prepared(new_vae(precision="int8"))
        assert len(counted) == 2


def test_an_error_of_the_choice_is_one_line_and_decodes_are_those_of_auto(
    latent, monkeypatch, caplog
):
    def fails(*_):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(layers, "choose", fails)
    expected = new_vae().decode(latent)
    vae = new_vae(precision="int8")
    for _ in range(2):
        prepared(vae)
        assert torch.equal(vae.decode(latent), expected)
    (line,) = [each for each in warnings_of(caplog) if "int8" in each]
    assert "the choice of int8 failed (no such kernel)" in line


def test_weights_on_their_way_to_a_gpu_are_measured_there(latent, counted, monkeypatch):
    """A host keeps them on the CPU until they are needed."""
    monkeypatch.setattr(settings, "default_device", lambda: torch.device("cuda"))
    vae = new_vae(precision="int8")
    assert not vae._int8.jobs
    vae.decode(latent)  # on the CPU after all
    assert len(vae._int8.jobs) == 1
    prepared(vae)
    assert len(counted) == 1
