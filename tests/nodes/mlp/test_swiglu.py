"""What is recognised as a gated MLP: ComfyUI's own classes, every spelling, and no look-alike."""

import importlib
import logging

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.mlp.mlps import ALIKE, UNLIKE

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("comfyui")]


def recognised(module):
    from fast_video_vae.nodes.mlp.swiglu import recognise

    return recognise(module, type(module))


def wiring(*arguments):
    from fast_video_vae.nodes.mlp.swiglu import Wiring

    return Wiring(*arguments)


@pytest.mark.parametrize(("cls", "expected"), ALIKE.items())
def test_every_spelling_is_recognised_with_its_wiring(cls, expected):
    assert recognised(cls()) == wiring(*expected)
    assert recognised(cls().eval()) == wiring(*expected)
    with torch.inference_mode():
        assert recognised(cls()) == wiring(*expected)


@pytest.mark.parametrize("cls", UNLIKE)
def test_a_look_alike_is_none(cls):
    assert recognised(cls()) is None
    assert recognised(cls().eval()) is None


def layers():
    import comfy.ops

    return {"device": "meta", "operations": comfy.ops.disable_weight_init}


# By file of comfy.ldm: the class, its arguments, and how it is wired.
CORE = [
    ("ace.ace_step15", "MLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("audio.dit", "GLU", (8, 16, nn.SiLU()), (("proj",), 1, None)),
    ("aura.mmdit", "MLP", (8,), (("c_fc1", "c_fc2"), 0, "c_proj")),
    ("flux.layers", "YakMLP", (8, 16), (("gate_proj", "up_proj"), 0, "down_proj")),
    ("genmo.joint_model.layers", "FeedForward", (8, 16, 8, None), (("w1",), 0, "w2")),
    ("hidream.model", "FeedForwardSwiGLU", (8, 16), (("w1", "w3"), 0, "w2")),
    ("krea2.model", "SwiGLU", (8, 4), (("gate", "up"), 0, "down")),
    ("lens.model", "GateMLP", (8, 16), (("w1", "w3"), 0, "w2")),
    ("minimax_music.dit", "GLU", (8, 16), (("proj",), 1, None)),
    ("omnigen.omnigen2", "LuminaFeedForward", (8, 16),
     (("linear_1", "linear_3"), 0, "linear_2")),
    ("seedvr.model", "SwiGLUMLP", (8, 4), (("proj_in_gate", "proj_in"), 0, "proj_out")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "name", "arguments", "expected"), CORE)
def test_the_classes_of_comfyui_are_recognised(file, name, arguments, expected):
    """On the meta device: no weight is there to be looked at."""
    cls = getattr(importlib.import_module(f"comfy.ldm.{file}"), name)
    assert recognised(cls(*arguments, dtype=None, **layers())) == wiring(*expected)


def test_those_of_lumina_and_flux_2_are_recognised():
    from comfy.ldm.flux.layers import SiLUActivation
    from comfy.ldm.lumina.model import FeedForward

    float16 = frozenset({torch.float16})
    lumina = FeedForward(8, 16, 8, None, layers())
    assert recognised(lumina) == wiring(("w1", "w3"), 0, "w2", float16)
    assert recognised(SiLUActivation()) == wiring((), 0, None)


def test_an_mlp_that_comfyui_fuses_itself_is_left_to_it(caplog):
    from comfy.ldm.minimax.model import MLP

    with caplog.at_level(logging.DEBUG):
        assert recognised(MLP(8, 16, **layers())) is None
    assert "no gated MLP" in caplog.messages[-1]
