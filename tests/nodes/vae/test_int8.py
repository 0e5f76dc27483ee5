"""The precision of the VAE nodes: stored in the VAE, kept, and absent in old workflows."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.machines import machine
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    fast_vae,
    latents,
    narrow_seedvr2,
    ours,
)
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.vae.streaming.int8 import layers as int8_layers
from fast_video_vae.vae.streaming.int8 import settings as int8_vae

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

CHOICES = ("auto", "int8")


def precision_of(vae):
    return vae.first_stage_model.precision


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "int8.safetensors")
    return "int8.safetensors"


@pytest.mark.parametrize("choice", CHOICES)
def test_both_nodes_store_the_precision(vae_name, stock, choice):
    for vae in (
        ours("Load", vae_name=vae_name, precision=choice).args[0],
        ours("Accelerate", vae=stock, precision=choice).args[0],
    ):
        assert precision_of(vae) == choice


@pytest.mark.parametrize("name", ["Load", "Accelerate"])
def test_the_input_is_optional_and_auto_by_default(name, vae_name, stock):
    from fast_video_vae.nodes.vae import nodes

    node = getattr(nodes, name)
    (field,) = [each for each in node.define_schema().inputs if each.id == "precision"]
    assert (field.options, field.default, field.optional) == ([*CHOICES], "auto", True)
    # A saved workflow has no such input.
    given = {"vae_name": vae_name} if name == "Load" else {"vae": stock}
    saved = node.execute(**given, dtype="auto", encode_dtype="auto", chunk=0)
    assert precision_of(saved.args[0]) == "auto"


@pytest.mark.parametrize("old", ["exact", "fast", "one", "all", "gpu:0, gpu:1"])
def test_what_older_workflows_have_in_its_place_is_auto(vae_name, stock, old):
    """Values of widgets are saved by position: a removed choice, and the devices."""
    from fast_video_vae.nodes.vae import nodes

    for name, given in (("Load", {"vae_name": vae_name}), ("Accelerate", {"vae": stock})):
        assert getattr(nodes, name).validate_inputs(precision=old) is True
        assert precision_of(ours(name, **given, precision=old).args[0]) == "auto"


def test_the_removed_choice_of_encodes_is_int8_and_said_once(vae_name, stock, caplog, monkeypatch):
    from fast_video_vae.nodes.vae import nodes

    monkeypatch.setattr(errors, "_logged", set())
    old = "int8 and encode"
    for name, given in (("Load", {"vae_name": vae_name}), ("Accelerate", {"vae": stock})):
        assert getattr(nodes, name).validate_inputs(precision=old) is True
        assert precision_of(ours(name, **given, precision=old).args[0]) == "int8"
    (line,) = [text for text in caplog.messages if old in text]
    assert "is 'int8', which is for decodes" in line


def test_the_devices_of_an_older_workflow_are_used(vae_name, monkeypatch):
    import comfy.model_management as management

    found = machine(monkeypatch, 2)
    monkeypatch.setattr(management, "get_torch_device", lambda: found[0])
    for precision, devices in (
        ("all", {}),
        ("all", {"devices": "one"}),
        ("one", {"devices": "all"}),
    ):
        (vae,) = ours("Load", vae_name=vae_name, precision=precision, **devices).args
        assert vae.first_stage_model.shared_by == found


def test_a_wrong_precision_is_refused(vae_name):
    from fast_video_vae.nodes.vae import nodes

    error = "precision: got 'fp8'; expected one of: auto, int8"
    with refused(error):
        ours("Load", vae_name=vae_name, precision="fp8")
    assert error in nodes.Load.validate_inputs(precision="fp8")


def test_auto_keeps_the_precision_of_a_fast_vae(state, tmp_path):
    fast = fast_vae(state, tmp_path, precision="int8")
    assert accelerated(fast) is fast
    assert precision_of(accelerated(fast, chunk=3)) == "int8"
    (again,) = ours("Accelerate", vae=fast, chunk=2).args
    assert precision_of(again) == precision_of(fast) == "int8"


def test_a_vae_that_comfyui_loads_again_keeps_the_precision(state, tmp_path):
    fast = fast_vae(state, tmp_path, precision="int8")
    for vae in (fast, accelerated(fast, chunk=2)):
        factory, arguments = vae.patcher.cached_patcher_init[:2]
        assert factory(*arguments).model.precision == "int8"


@pytest.fixture
def supported(monkeypatch, tmp_path):
    """A machine that supports int8, and keeps its choices in a new file."""
    kept = facts.Facts(tmp_path / "facts.json", {})
    monkeypatch.setattr(int8_layers, "facts_of", lambda device: kept)
    monkeypatch.setattr(int8_vae, "int8_lacks", lambda device, dtype: "")


def test_the_nodes_decode_in_int8(state, tmp_path, supported):
    samples = {"samples": latents(2)}
    fast = fast_vae(state, tmp_path)
    plain = ours("Decode", samples=samples, vae=fast).args[0]
    (coded,) = ours("Accelerate", vae=fast, precision="int8").args
    assert coded.first_stage_model.wait_until_prepared(60)
    images = ours("Decode", samples=samples, vae=coded).args[0]
    assert 1e-5 < (images - plain).abs().max() < 0.1
    assert torch.equal(ours("Decode", samples=samples, vae=coded).args[0], images)
    assert torch.equal(ours("Decode", samples=samples, vae=fast).args[0], plain)


def test_seedvr2_decodes_in_int8(comfyui, supported):
    stock = narrow_seedvr2(random_seedvr2())
    images = []
    for wish in ("auto", "int8"):
        (vae,) = ours("Accelerate", vae=stock, precision=wish).args
        assert vae.first_stage_model.wait_until_prepared(60)
        images += ours("Decode", samples={"samples": latents(2)}, vae=vae).args[:1]
    assert 1e-5 < (images[0] - images[1]).abs().max() < 0.1


def test_other_vaes_are_unchanged(comfyui, models, caplog):
    save_file({"pixel_space_vae": torch.tensor(1.0)}, models / "other.safetensors")
    with caplog.at_level(logging.INFO):
        (vae,) = ours("Load", vae_name="other.safetensors", precision="int8").args
    assert ours("Accelerate", vae=vae, precision="int8").args[0] is vae
