"""Recognition of gated MLPs: ComfyUI's own classes, and no similar ones."""

import importlib
import logging

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.mlp.mlps import UNLIKE

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


def recognised(module):
    from fast_video_vae.nodes.mlp.swiglu import recognise

    return recognise(module, type(module))


def wiring(*arguments):
    from fast_video_vae.nodes.mlp.swiglu import Wiring

    return Wiring(*arguments)


@pytest.mark.parametrize("cls", UNLIKE)
def test_a_similar_class_is_not_recognised(cls):
    assert recognised(cls()) is None
    assert recognised(cls().eval()) is None


def layers():
    import comfy.ops

    return {"device": "meta", "operations": comfy.ops.disable_weight_init}


# File of comfy.ldm, class, arguments and wiring; test_fuse_mlp.py has those of whole models.
CORE = [
    ("ace.ace_step15", "MLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("audio.dit", "GLU", (8, 16, nn.SiLU()), (("proj",), 1, None)),
    ("aura.mmdit", "MLP", (8,), (("c_fc1", "c_fc2"), 0, "c_proj")),
    ("flux.layers", "YakMLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("genmo.joint_model.layers", "FeedForward", (8, 16, 8, None), (("w1",), 0, "w2")),
    ("krea2.model", "SwiGLU", (8, 4), (("gate", "up"), 0, "down")),
    ("lens.model", "GateMLP", (8, 16), (("w1", "w3"), 0, "w2")),
    ("minimax_music.dit", "GLU", (8, 16), (("proj",), 1, None)),
    ("omnigen.omnigen2", "LuminaFeedForward", (8, 16), (("linear_1", "linear_3"), 0, "linear_2")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "name", "arguments", "expected"), CORE)
def test_the_classes_of_comfyui_are_recognised(file, name, arguments, expected):
    """The weights are on the meta device, so that they cannot be read."""
    cls = getattr(importlib.import_module(f"comfy.ldm.{file}"), name)
    assert recognised(cls(*arguments, dtype=None, **layers())) == wiring(*expected)


def test_the_mlp_of_lumina_saturates_in_float16():
    from comfy.ldm.lumina.model import FeedForward

    lumina = FeedForward(8, 16, 8, None, layers())
    assert recognised(lumina) == wiring(("w1", "w3"), 0, "w2", frozenset({torch.float16}))


def test_an_mlp_that_comfyui_fuses_is_not_recognised(caplog):
    from comfy.ldm.minimax.model import MLP

    with caplog.at_level(logging.DEBUG):
        assert recognised(MLP(8, 16, **layers())) is None
    assert "not a gated MLP" in caplog.messages[-1]
