"""The precision of the VAE nodes: stored in the VAE, kept, and absent in old workflows."""

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.vae.machines import machine
from fast_video_vae.tests.nodes.vae.pairs import (
    latents,
    ours,
)
from fast_video_vae.vae.streaming.int8 import layers as int8_layers
from fast_video_vae.vae.streaming.int8 import settings as int8_vae

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


def precision_of(vae):
    return vae.first_stage_model.precision


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "int8.safetensors")
    return "int8.safetensors"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((None, "auto"), ("auto", "auto"), ("int8", "int8"), ("int8 and encode", "int8")),
        *((old, "auto") for old in ("exact", "fast", "one", "all", "gpu:0, gpu:1")),
    ],
)
def test_both_nodes_store_the_precision(vae_name, stock, caplog, monkeypatch, given, kept):
    """Values of widgets are saved by position: a removed choice, and the devices."""
    from fast_video_vae.nodes.vae import nodes

    monkeypatch.setattr(errors, "_logged", set())
    for name, inputs in (("Load", {"vae_name": vae_name}), ("Accelerate", {"vae": stock})):
        node = getattr(nodes, name)
        (field,) = [each for each in node.define_schema().inputs if each.id == "precision"]
        assert (field.options, field.default, field.optional) == (["auto", "int8"], "auto", True)
        if given is None:  # a saved workflow has no such input
            (vae,) = node.execute(**inputs, dtype="auto", encode_dtype="auto", chunk=0).args
        else:
            assert node.validate_inputs(precision=given) is True
            (vae,) = ours(name, **inputs, precision=given).args
        assert precision_of(vae) == kept
    lines = [text for text in caplog.messages if "is 'int8', which is for decodes" in text]
    assert len(lines) == (given == "int8 and encode")


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


@pytest.fixture
def supported(monkeypatch, tmp_path):
    """A machine that supports int8, and keeps its choices in a new file."""
    kept = facts.Facts(tmp_path / "facts.json", {})
    monkeypatch.setattr(int8_layers, "facts_of", lambda device: kept)
    monkeypatch.setattr(int8_vae, "int8_lacks", lambda device, dtype: "")


def test_the_nodes_decode_in_int8(family, supported):
    samples = {"samples": latents(2)}
    (coded,) = ours("Accelerate", vae=family.fast, precision="int8").args
    assert coded.first_stage_model.wait_until_prepared(60)
    plain, images, again, after = (
        ours("Decode", samples=samples, vae=vae).args[0]
        for vae in (family.fast, coded, coded, family.fast)
    )
    assert 1e-5 < (images - plain).abs().max() < 0.1
    assert torch.equal(again, images)
    assert torch.equal(after, plain)
