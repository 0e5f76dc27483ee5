"""Filters of layers, on the names of real models."""

import pytest

from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.tests.lora.models import modules, wan

NAMES = modules(wan(blocks=40))
OUTSIDE = [name for name in NAMES if not name.startswith("blocks")]


# Filters, each with the factors of some layers.
CHOICES = {
    "": dict.fromkeys(NAMES, 1),
    " \n": dict.fromkeys(NAMES, 1),
    # Numbers choose blocks: the first one in a name, and 7 is not 17.
    "0-19": {"blocks.19.ffn.0": 1, "blocks.20.ffn.0": 0},
    "7": {"transformer_blocks.7.attn.to_q": 1, "blocks.17.ffn.0": 0},
    "07": {"blocks.7.ffn.0": 1},
    "20-": {"blocks.39.ffn.0": 1, "blocks.19.ffn.0": 0},
    "3": {"diffusion_model.blocks.3.self_attn.q": 1, "double_blocks.3.img_attn.qkv": 1},
    "0": {"blocks.12.ffn.0": 0},
    "4": {"input_blocks.4.1.transformer_blocks.0.attn1.to_q": 1},
    # An exclusion holds at any position.
    "!5": {"blocks.5.ffn.0": 0, "blocks.6.ffn.0": 1},
    "0-9,!5": {"blocks.5.ffn.0": 0, "blocks.10.ffn.0": 0},
    "!5,0-9": {"blocks.5.ffn.0": 0},
    "!5,5=2": {"blocks.5.ffn.0": 0},
    "!0-9,!30-": {"blocks.29.ffn.0": 1, "blocks.30.ffn.0": 0},
    # A factor chooses, too, and the last item that fits gives it.
    "8-11=0.5": {"blocks.8.ffn.0": 0.5, "blocks.7.ffn.0": 0},
    "0-,8-11=0.5": {"blocks.7.ffn.0": 1, "blocks.11.ffn.0": 0.5},
    "8-11=0.5,0-": {"blocks.11.ffn.0": 1},
    "0-19=-1.5": {"blocks.0.ffn.0": -1.5},
    "5=0": {"blocks.5.ffn.0": 0},
    # Names choose layers, by whole segments in a row; case matters.
    "self_attn": {"blocks.12.self_attn.q": 1, "blocks.12.cross_attn.q": 0},
    "self_attn.q": {
        "blocks.12.self_attn.q": 1, "blocks.12.self_attn.k": 0, "blocks.12.self_attn.norm.q": 0,
    },
    "attn": {"blocks.12.self_attn.q": 0},
    "*attn": {"blocks.12.self_attn.q": 1},
    "attn*": {"transformer_blocks.0.attn1.to_q": 1},
    "ffn.0": {"blocks.1.ffn.0": 1, "blocks.0.ffn.2": 0},
    "ffn.[02]": {"blocks.0.ffn.2": 1},
    "blocks.?.ffn": {"blocks.5.ffn.0": 1, "blocks.15.ffn.0": 0},
    "img*": {
        "img_emb.proj.1": 1, "double_blocks.0.img_attn.qkv": 1, "blocks.0.cross_attn.k_img": 0,
    },
    "*_img": {"blocks.0.cross_attn.k_img": 1},
    "Self_Attn": {"blocks.12.self_attn.q": 0},
    "!cross_attn": {"blocks.12.cross_attn.q": 0, "blocks.12.ffn.0": 1},
    "cross_attn,!*_img": {"blocks.0.cross_attn.k_img": 0, "blocks.0.cross_attn.k": 1},
    "*,cross_attn=0.5": {"blocks.0.cross_attn.k": 0.5, "blocks.0.ffn.0": 1},
    "head": {"head.head": 1},
    # A layer has to pass the numbers and the names.
    "0-19,self_attn": {
        "blocks.19.self_attn.q": 1, "blocks.20.self_attn.q": 0, "blocks.19.ffn.0": 0,
    },
    "0-19,!cross_attn": {"blocks.19.ffn.0": 1, "blocks.19.cross_attn.q": 0},
    "self_attn,!5": {"blocks.5.self_attn.q": 0, "blocks.6.self_attn.q": 1},
    "0-,8-11=0.5,*,ffn=0.5": {"blocks.9.ffn.0": 0.25, "blocks.7.ffn.0": 0.5},
    " 0 - 19 , ! cross_attn , ffn = .5 ": {"blocks.1.ffn.0": 0.5},
    # Layers outside the blocks, such as text_embedding.0, are included unless only numbers select.
    "!0": dict.fromkeys(OUTSIDE, 1),
    "!5,!cross_attn": dict.fromkeys(OUTSIDE, 1),
    "0-": dict.fromkeys(OUTSIDE, 0),
    "0-9,!cross_attn": dict.fromkeys(OUTSIDE, 0),
    "0-,*": dict.fromkeys(OUTSIDE, 1),
    "0-,8-11=0.5,*": dict.fromkeys(OUTSIDE, 1),
    "self_attn,ffn": dict.fromkeys(OUTSIDE, 0),
}  # fmt: skip


@pytest.mark.parametrize("text", CHOICES)
def test_a_filter_gives_a_factor_per_layer(text):
    filtered = parse_blocks(text)
    assert {name: filtered.factor(name) for name in CHOICES[text]} == CHOICES[text]


@pytest.mark.parametrize(
    "text",
    [
        ",", "0-19,", ",ffn", "ffn,,5",  # empty items
        "!", "!!5", "5!", "=0.5", "!=0.5",
        "-5", "5--7", "5-7-9", "1.5", "5 7", "self attn", "19-0", "3-2",
        "ffn.", ".ffn", "ffn..0",  # empty segments
        "9" * 5000,  # more digits than Python converts to an int
        "5=", "5=half", "5=nan", "5=inf", "5=1=2", "!5=0.5",
    ],
)  # fmt: skip
def test_an_invalid_filter_is_a_one_line_error(text):
    with pytest.raises(ValueError, match="expected") as error:
        parse_blocks(text)
    assert f"blocks {text!r}" in str(error.value)
    assert "\n" not in str(error.value)
