"""Every spelling of every parameter is found, and no spelling finds another one."""

import itertools

import pytest

from fast_video_vae.lora.keys import Target, Targets, split_key
from fast_video_vae.tests.lora import models
from fast_video_vae.tests.lora.models import PREFIX, SPELLINGS, diffusers_of_wan, stem_of

WAN = models.wan(blocks=13, vace=2)
NAMES = "attn.norm_q", "attn.to_q", "attn.to_out.0", "attn.add_k_proj", "img_mlp.net.0.proj"
QWEN = {
    f"{PREFIX}transformer_blocks.{number}.{name}.weight": (16, 16)
    for number, name in itertools.product(range(24), NAMES)
}
QWEN[f"{PREFIX}transformer_blocks.0.img_mlp.net.0.proj.bias"] = (16,)
MODELS = {
    "wan": WAN,
    "qwen": QWEN,
    "compiled wan": {key.replace(PREFIX, f"{PREFIX}_orig_mod."): WAN[key] for key in WAN},
}
TARGETS = {
    name: Targets(shapes | {"first_stage_model.conv.weight": (4, 4)})
    for name, shapes in MODELS.items()
}


def names_of(model):
    """Return `{name in a file: key}` of a model's parameters but biases."""
    names = models.own_names(MODELS[model]).items()
    names = {name.removeprefix("_orig_mod."): key for name, key in names}
    theirs = diffusers_of_wan(WAN) if model != "qwen" else {}
    return names | {name: names[own] for name, own in theirs.items()}


# What ends a key, by the name of its part; None: of modules outside the model, biases of PEFT's
# `lora_bias`, and what describes a quantised matrix.
ENDINGS = {
    **{part: [f".{part}"] for part in ("diff", "diff_b", "b_norm", "w_norm", "dora_scale")},
    "up": [models.endings_of(each)[0] for each in models.ENDINGS],
    "down": [models.endings_of(each)[1] for each in models.ENDINGS],
    "alpha": [".alpha", ".lora_alpha"],
    "magnitude": [f".lora_magnitude_vector{end}" for end in ("", ".weight", ".my-style.v2.weight")],
    None: [
        ".weight", "_loras.down.weight", ".lora_B.my-style.v2.bias", ".lora_A.scale",
        ".lora_A.weight_scale", ".lora_A.weight.absmax", ".lora_A.comfy_quant",
        ".lora_A.weight.quant_state.bitsandbytes__nf4",
    ],
}  # fmt: skip
KEYS = [(part, ending) for part, endings in ENDINGS.items() for ending in endings]


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_found_in_every_spelling(model):
    """Each by its name with the next ending of a key."""
    targets, named = TARGETS[model], itertools.product(SPELLINGS, names_of(model).items())
    for (spelling, (name, key)), (part, ending) in zip(named, itertools.cycle(KEYS)):
        stem, bias = stem_of(name, spelling), Target(f"{key.removesuffix('.weight')}.bias")
        parsed = split_key(stem + ending)
        assert (parsed or (None,))[:2] == ((stem, part) if part else (None,)), stem + ending
        assert targets.find(stem, "up") == Target(key), stem
        found = bias if bias.key in targets.shapes else None
        assert targets.find(stem, "diff_b") == targets.find(stem, "b_norm") == found, stem
        if name.endswith(".modulation"):  # lightx2v: by its block
            block = stem_of(name.removesuffix(".modulation"), spelling)
            assert split_key(f"{block}.diff_m")[:2] == (block, "diff_m")
            assert targets.find(block, "diff_m") == Target(key), block


# Of modules that the model does not have.
ABSENT = {
    "blocks.0.self_attn.q_loras", "blocks.0.self_attn", "q", "", "locks.0.self_attn.q",
    # One block more than it has, and a layer that only the first VACE block has.
    "blocks.13.self_attn.q", "vace_blocks.1.proj_in", "blocks.4.norm1",
    "first_stage_model.conv", "conv",  # outside the network
    # The prefixes are limited: a key of many would take time in the square of its length.
    "model." * 20 + "blocks.0.self_attn.q",
}  # fmt: skip


@pytest.mark.parametrize(("model", "other"), [("wan", "qwen"), ("qwen", "wan")])
def test_no_spelling_of_another_name_finds_a_parameter(model, other):
    """Names of the other model, and names of this one with a segment more or less."""
    known = set(names_of(model))
    wrong = {f"{name}.extra" for name in known} | {f"other.{name}" for name in known}
    wrong |= {name.partition(".")[2] for name in known} | set(names_of(other)) | ABSENT
    for name, spelling in itertools.product(wrong - known, SPELLINGS):
        assert TARGETS[model].find(stem_of(name, spelling), "up") is None, name
    assert TARGETS[model].find("blocks.0.self_attn", "diff_m") is None


def test_an_ambiguous_spelling_finds_no_module():
    targets = Targets({f"{PREFIX}a.b_c.weight": (4, 4), f"{PREFIX}a_b.c.weight": (4, 4)})
    assert not any(targets.find(stem, "up") for stem in ("lora_unet_a_b_c", "a.b.c"))
    # With its own dots a name is unambiguous.
    assert targets.find("diffusion_model.a.b_c", "up") == Target(f"{PREFIX}a.b_c.weight")


def test_extra_names_find_parts_of_a_weight_after_the_models_own_names():
    """For example the halves of Qwen-Image's fused gate."""
    fused = Target(f"{PREFIX}transformer_blocks.0.img_mlp.net.0.proj.weight")
    half, own = fused._replace(offset=(0, 4, 12)), "transformer_blocks.0.attn.to_q"
    targets = Targets(QWEN, more={"img_mlp.value": half, own: fused})
    assert {targets.find(stem_of("img_mlp.value", each), "up") for each in SPELLINGS} == {half}
    assert targets.shape(half) == (12, 16)
    assert targets.find("img_mlp.value", "diff_b") is None  # the rows of the bias are unknown
    assert targets.find(own, "up") == Target(f"{PREFIX}{own}.weight")
