"""Scales of the pairs of LoRA files, and key reports."""

import json
import math
import re

import pytest
import torch

from fast_video_vae.lora.file import LoraFile
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora.models import (
    PREFIX,
    diffusers_of_wan,
    modules,
    random_pairs,
    spelled,
    wan,
)

WAN = wan(blocks=2, vace=1)
TARGETS = Targets(WAN)
T2V = Targets(wan(blocks=2, i2v=False))
NAMES = modules(WAN)
PAIRS = random_pairs(WAN, NAMES)
SOME = {name: PAIRS[name] for name in NAMES if name.startswith("blocks.0.self_attn")}


@pytest.mark.parametrize(
    ("alpha", "metadata", "scale"),
    [
        (None, {}, 1.0),
        (2, {}, 2 / 4),
        (8, {}, 8 / 4),
        (None, {"lora_alpha": "8"}, 8 / 4),
        (None, {"lora_adapter_metadata": {"transformer.lora_alpha": 8, "transformer.r": 4}}, 8 / 4),
        (2, {"lora_alpha": "8"}, 2 / 4),  # the alpha of the pair takes precedence
        (None, {"use_rslora": "True"}, 1.0),
        (None, {"use_rslora": "true", "lora_alpha": "8"}, 8 / math.sqrt(4)),
        (2, {"use_rslora": "True"}, 2 / math.sqrt(4)),
        (2, {"use_rslora": "False"}, 2 / 4),
        (
            None,
            {"lora_adapter_metadata": {"unet.use_rslora": True, "unet.lora_alpha": 8}},
            8 / math.sqrt(4),
        ),
        (2, {"lora_adapter_metadata": {"transformer.use_rslora": False}}, 2 / 4),
        (2, {"adapter_config": {"use_rslora": True}}, 2 / math.sqrt(4)),
        (2, {"lora_adapter_metadata": "no JSON", "format": "pt"}, 2 / 4),
        (2, {"lora_adapter_metadata": [1, 2]}, 2 / 4),
        (None, {"lora_alpha": "None"}, 1.0),
        (None, {"lora_adapter_metadata": {"transformer.lora_alpha": None}}, 1.0),
    ],
)
def test_alpha_and_metadata_set_the_scale_of_a_pair(write, alpha, metadata, scale):
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }
    file = LoraFile(write(spelled(SOME, alpha=alpha), metadata=metadata), TARGETS)
    for entry in file.entries:
        assert file.read(entry).scale == pytest.approx(scale, rel=1e-6)


# Reports about keys.


def test_image_keys_for_a_text_to_video_model_are_counted(write):
    names = [name for name in NAMES if not name.startswith(("vace", "img_emb"))]
    pairs = random_pairs(WAN, names)
    tensors = spelled(pairs, alpha=1)
    tensors |= {
        f"diffusion_model.blocks.{n}.cross_attn.norm_k_img.diff": torch.ones(16) for n in (0, 1)
    }
    lines = LoraFile(write(tensors), T2V).report.lines()
    used = 3 * (len(names) - 4)
    assert lines == [
        f"some.safetensors: {used} keys applied",
        "  12 keys for k_img/v_img: not in this model",
        "  2 keys for norm_k_img: not in this model",
    ]


@pytest.mark.parametrize(
    ("spelling", "diffusers", "named"),
    [
        ("kohya", False, "cross_attn_k_img/cross_attn_v_img"),
        ("mixed", False, "k_img/v_img"),
    ],
)
def test_absent_keys_are_counted_by_their_names_in_the_file(write, spelling, diffusers, named):
    names = {own: theirs for theirs, own in diffusers_of_wan(WAN).items()} if diffusers else {}
    pairs = {name: PAIRS[name] for name in NAMES if re.match(r"blocks\.\d\.cross_attn", name)}
    lines = LoraFile(write(spelled(pairs, spelling, names=names)), T2V).report.lines()
    assert lines[1:] == [f"  8 keys for {named}: not in this model"]


OTHERS = [f"other.{n}{c}" for n in range(3) for c in "abc"]
WIDE = {f"{PREFIX}patch_embedding.weight": (16, 12, 1, 2, 2)}  # the width of a control LoRA
TEXT_ENCODER = [
    "text_encoder.norm.weight",
    *(
        f"lora_te_text_model_layers_{n}.lora_{part}.weight"
        for n in "012"
        for part in ("up", "down")
    ),
]


@pytest.mark.parametrize(
    ("tensors", "reported"),
    [
        (
            spelled(random_pairs({f"{PREFIX}{name}.weight": (4, 4) for name in OTHERS}, OTHERS)),
            "  18 keys for 0a/0b/0c/1a/...: not in this model",
        ),
        (
            {f"dwpose_embedding.{n}.weight": torch.ones(2) for n in range(4)},
            "  4 keys of an unknown form: dwpose_embedding.0.weight, dwpose_embedding.1.weight, "
            "dwpose_embedding.2.weight, ...",
        ),
        (
            {key: torch.ones(2, 2) for key in TEXT_ENCODER},
            "  7 keys for a text encoder: not applied to a model",
        ),
        (
            spelled(random_pairs(WIDE, ["patch_embedding"])),
            "  2 keys do not fit: a pair for 16x48 and a parameter of 16x6x1x2x2",
        ),
    ],
    ids=["absent", "unknown", "text-encoder", "unfit"],
)
def test_skipped_keys_are_reported_in_one_line(write, tensors, reported):
    file = LoraFile(write(spelled(SOME) | tensors), TARGETS)
    assert file.report.lines()[1:] == [reported]
    assert len(file.entries) == len(SOME)


def test_the_first_of_two_pairs_for_one_weight_is_applied(write):
    """Some files store a LoRA in two dialects; mixing halves of both would be wrong."""
    names = {own: theirs for theirs, own in diffusers_of_wan(WAN).items()}
    others = random_pairs(WAN, [*SOME], rank=8, seed=1)
    one, two = spelled(SOME), spelled(others, "transformer", "kohya", names=names)
    file = LoraFile(write(one | two), TARGETS)
    assert file.report.lines()[1:] == [
        f"  {len(two)} keys are ignored: earlier keys or adapters have their weights"
    ]
    ranks = {len(file.read(entry).down) for entry in file.entries}
    assert len(ranks) == 1
