"""Every spelling of every module is found, and no spelling finds another module."""

import re

import pytest
import torch

from fast_video_vae.lora.keys import Target, Targets, is_of_text_encoder, split_key
from fast_video_vae.tests.lora.models import (
    ENDINGS,
    PREFIX,
    SPELLINGS,
    diffusers_of_wan,
    modules,
    qwen,
    wan,
)

WAN = wan(blocks=13, vace=2)
QWEN = qwen(blocks=12)
MODELS = {"wan": (WAN, Targets(WAN)), "qwen": (QWEN, Targets(QWEN))}
THEIRS = diffusers_of_wan(WAN)
THEIR_REST = diffusers_of_wan(WAN, rest=True)


def names_of(model):
    """Return `{name in a file: name in the model}` of a model's modules."""
    return {name: name for name in modules(MODELS[model][0])} | (THEIRS if model == "wan" else {})


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_module_is_found_in_every_spelling(model, spelling):
    _, targets = MODELS[model]
    for name, own in names_of(model).items():
        stem = SPELLINGS[spelling](name)
        assert targets.find(stem, "up") == Target(f"{PREFIX}{own}.weight"), stem


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_up_and_down_are_recognised_by_their_endings(spelling):
    for name in ("blocks.12.self_attn.q", "blocks.0.ffn.net.0.proj", "head.head", "proj_out"):
        stem = SPELLINGS[spelling](name)
        for ends in ENDINGS.values():
            assert [split_key(stem + end)[:2] for end in ends] == [(stem, "up"), (stem, "down")]


# Endings by part, where they differ from the name of the part.
OTHER_ENDINGS = {
    "alpha": ["alpha", "lora_alpha"],
    "mid": ["lora_mid.weight"],
    "magnitude": [
        f"lora_magnitude_vector{name}{end}"
        for name in ("", ".default", ".my-style.v2")
        for end in ("", ".weight")
    ],
    "lokr_w2_a": ["lokr_w2_a", "lokr_w2_a.my-style.v2"],
    "a1": ["a1.weight"],
    "b2": ["b2.weight"],
}
SAME_ENDINGS = (
    "dora_scale", "diff", "diff_b", "diff_m", "set_weight", "reshape_weight", "w_norm", "b_norm",
    "hada_w1_a", "hada_t2", "lokr_w1", "lokr_w2_b", "lokr_t2", "oft_blocks", "rescale",
)  # fmt: skip


def test_other_parts_are_recognised_by_their_endings():
    for part, endings in (OTHER_ENDINGS | {part: [part] for part in SAME_ENDINGS}).items():
        for stem in ("lora_unet_blocks_0_self_attn_q", "diffusion_model.blocks.0.self_attn.q"):
            assert {split_key(f"{stem}.{ending}")[:2] for ending in endings} == {(stem, part)}


@pytest.mark.parametrize(
    "key",
    [
        "blocks.0.self_attn.q_loras.down.weight",  # Stand-In: only for reference tokens
        "dwpose_embedding.0.weight",  # UniAnimate: a module of its own
        "randomref_embedding_pose.0.bias",
        "blocks.0.self_attn.q.weight",
        "blocks.0.self_attn.q.lora_B.bias",  # PEFT with lora_bias: not the matrix
        "blocks.0.self_attn.q.lora_B.default.bias",
        "blocks.0.self_attn.q.lora_B.my-style.v2.bias",
        # Of a quantised matrix: not the matrix
        *(f"blocks.0.self_attn.q.lora_A.{end}" for end in (
            "scale", "weight_scale", "scale_weight", "weight.scale", "my-style.v2.weight_scale",
            "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "comfy_quant",
        )),
        "lora_A.weight",  # no module name
        *(".alpha", "", "__metadata__"),
    ],
)  # fmt: skip
def test_unknown_keys_are_not_split(key):
    assert split_key(key) is None


@pytest.mark.parametrize(
    "stem",
    [
        "dwpose_embedding.0", "pipe.dit.dwpose_embedding.0", "blocks.0.self_attn.q_loras",
        # One block more than the model has, and a layer that only the first VACE block has.
        "blocks.13.self_attn.q", "lora_unet_blocks_13_self_attn_q", "vace_blocks.2.self_attn.q",
        "vace_blocks.1.proj_in",
        "blocks.0.self_attn", "blocks.0.attn3.to_q", "blocks.4.norm1", "self_attn.q", "q",
        "", "lora_unet_", "diffusion_model.", "locks.0.self_attn.q", "xblocks.0.self_attn.q",
        "other.blocks.0.self_attn.q", "blocks.0.self_attn.q.extra",
    ],
)  # fmt: skip
def test_modules_missing_in_the_model_are_not_found(stem):
    assert MODELS["wan"][1].find(stem, "up") is None


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_diffusers_names_of_norms_and_tables_are_found(spelling):
    targets = MODELS["wan"][1]
    assert len(THEIR_REST) > 7 * 15
    # diffusers' norm3 is Wan's norm2, which has no parameters; its norm2 is Wan's norm3.
    for theirs, ours in (THEIR_REST | {ours: ours for ours in THEIR_REST.values()}).items():
        key = f"{PREFIX}{ours}"
        key = key if key in WAN else f"{key}.weight"
        assert targets.find(SPELLINGS[spelling](theirs), "diff") == Target(key), theirs


@pytest.mark.parametrize("model", MODELS)
def test_a_bias_is_found_by_the_name_of_its_module(model):
    shapes, targets = MODELS[model]
    for spelling in SPELLINGS.values():
        for name, own in names_of(model).items():
            for part in ("diff_b", "b_norm"):
                found = targets.find(spelling(name), part)
                assert found == Target(f"{PREFIX}{own}.bias")
    norm = f"{PREFIX}blocks.0.self_attn.norm_q"
    assert f"{norm}.weight" not in shapes or targets.find(norm, "diff_b") is None


def test_a_modulation_is_found_by_its_block_or_its_own_name():
    targets = MODELS["wan"][1]
    for owner in ("blocks.0", "blocks.12", "vace_blocks.1", "head"):
        expected = Target(f"{PREFIX}{owner}.modulation")
        for spelling in SPELLINGS.values():
            assert targets.find(spelling(owner), "diff_m") == expected
            assert targets.find(spelling(f"{owner}.modulation"), "diff") == expected
    assert targets.find("blocks.13", "diff_m") is None
    assert targets.find("blocks.0.self_attn", "diff_m") is None


# Halves of fused layers by name, as in Flux's `double_blocks` and Qwen-Image's gate.
HALVES = {
    "transformer_blocks.0.img_mlp.gate": Target(
        f"{PREFIX}transformer_blocks.0.img_mlp.net.0.proj.weight", (0, 0, 32)
    ),
    "transformer_blocks.0.img_mlp.value": Target(
        f"{PREFIX}transformer_blocks.0.img_mlp.net.0.proj.weight", (0, 32, 32)
    ),
}


def test_parts_of_a_weight_are_found_by_extra_names():
    targets = Targets(QWEN, more=HALVES)
    for name, target in HALVES.items():
        for spelling in SPELLINGS.values():
            assert targets.find(spelling(name), "up") == target
        assert targets.shape(target) == (32, 16)
        assert targets.find(name, "diff_b") is None  # the rows of the bias are unknown
    assert targets.find("transformer_blocks.0.img_mlp.net.0.proj", "up").offset is None


def test_a_name_of_the_model_takes_precedence_over_an_extra_name():
    other = Target(f"{PREFIX}proj_out.weight")
    targets = Targets(QWEN, more={"img_in": other, "final": other})
    assert targets.find("img_in", "up") == Target(f"{PREFIX}img_in.weight")
    assert targets.find("lora_unet_final", "up") == other


def test_a_compiled_model_is_found_by_the_names_of_its_layers():
    compiled = {f"{PREFIX}_orig_mod.{key.removeprefix(PREFIX)}": WAN[key] for key in WAN}
    targets = Targets(compiled)
    for name, own in names_of("wan").items():
        for spelling in ("diffusion_model", "kohya", "compiled", "compiled-blocks"):
            found = targets.find(SPELLINGS[spelling](name), "up")
            assert found == Target(f"{PREFIX}_orig_mod.{own}.weight")


def test_an_ambiguous_spelling_finds_no_module():
    shapes = {f"{PREFIX}a.b_c.weight": (4, 4), f"{PREFIX}a_b.c.weight": (4, 4)}
    targets = Targets(shapes)
    assert targets.find("lora_unet_a_b_c", "up") is None
    assert targets.find("lycoris_a_b_c", "up") is None
    assert targets.find("a.b.c", "up") is None
    # With dots the name is unambiguous.
    assert targets.find("diffusion_model.a.b_c", "up") == Target(f"{PREFIX}a.b_c.weight")
    assert targets.find("transformer.a_b.c", "up") == Target(f"{PREFIX}a_b.c.weight")


def test_parameters_outside_the_network_are_not_found():
    targets = Targets({**WAN, "first_stage_model.conv.weight": (4, 4)})
    assert targets.find("first_stage_model.conv", "up") is None
    assert targets.find("conv", "up") is None


def test_text_encoders_are_recognised_by_their_names():
    for key in (
        "lora_te_text_model_encoder_layers_0_mlp_fc1", "lora_te1_text_model", "te1.layers",
        "text_encoder.layers.0", "text_encoders.umt5xxl.transformer.encoder",
        "text_encoder_2.layers.0", "clip_l.transformer",
    ):  # fmt: skip
        assert is_of_text_encoder(key)
    others = "text_embedding.0", "lora_unet_text_embedding_0", "txt_in", "temporal.0"
    for key in (*others, "time_embedding.0"):
        assert not is_of_text_encoder(key)


def test_no_spelling_of_another_name_finds_a_module():
    """Names of the other model, and names of this one with a segment more or less."""
    names = {model: set(names_of(model)) for model in MODELS}
    for model, others in (("wan", "qwen"), ("qwen", "wan")):
        known = names[model] | (set(THEIR_REST) if model == "wan" else set())
        wrong = names[others] | {f"{name}.extra" for name in known}
        wrong |= {f"other.{name}" for name in known} | {name.partition(".")[2] for name in known}
        wrong |= {re.sub(r"\d+", "99", name) for name in known if "blocks" in name}
        assert len(wrong - known) > 900
        for name in wrong - known:
            for spelling in SPELLINGS.values():
                assert MODELS[model][1].find(spelling(name), "up") is None, name


@pytest.mark.slow  # importing diffusers takes seconds
def test_the_table_of_names_matches_diffusers():
    transformers = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    with torch.device("meta"):
        model = transformers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=8, ffn_dim=24, num_layers=13, text_dim=12,
            image_dim=20, added_kv_proj_dim=16, pos_embed_seq_len=5,
        )  # fmt: skip
    names = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    names = {name for name in names if not name.endswith(".bias")}
    table = {name for name in THEIRS | THEIR_REST if not name.startswith("vace")}
    assert names - table == {"patch_embedding"}  # the same name in both
    assert table - names == set()
