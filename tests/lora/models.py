"""Parameter names of small Wan and Qwen-Image models, and their spellings in LoRA files.

The names are those of the published checkpoints. The table of diffusers' names is independent of
the library's: it is from diffusers' converter (`convert_wan_to_diffusers.py`), and maps in the
opposite direction.
"""

import re

import torch

from fast_video_vae.lora.blocks import parse_blocks
from fast_video_vae.lora.schedule import parse_schedule
from fast_video_vae.lora.strengths import Amounts, StackEntry

PREFIX = "diffusion_model."

# Rows and columns of the layers of a block; d: width, f: width of the feed forward.
_WAN_BLOCK = {
    **{f"self_attn.{name}": ("d", "d") for name in "qkvo"},
    **{f"cross_attn.{name}": ("d", "d") for name in "qkvo"},
    "ffn.0": ("f", "d"),
    "ffn.2": ("d", "f"),
}
_WAN_NORMS = ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k")

WAN_DIFFUSERS_BLOCK = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
# Norms and tables, which LoRA files store as differences.
WAN_DIFFUSERS_BLOCK_REST = {
    "attn1.norm_q": "self_attn.norm_q",
    "attn1.norm_k": "self_attn.norm_k",
    "attn2.norm_q": "cross_attn.norm_q",
    "attn2.norm_k": "cross_attn.norm_k",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "norm2": "norm3",  # Wan applies its norms in the order 1, 3, 2
    "scale_shift_table": "modulation",
}
WAN_DIFFUSERS_TOP = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}
WAN_DIFFUSERS_TOP_REST = {
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "scale_shift_table": "head.modulation",
}
WAN_DIFFUSERS_VACE = {"proj_in": "before_proj", "proj_out": "after_proj"}


def _shapes(linears, others):
    """Return `{key: shape}` of linear layers with a bias, and of other parameters."""
    shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()} | others
    return {f"{PREFIX}{key}": shape for key, shape in shapes.items()}


def wan(blocks=2, d=16, f=24, *, i2v=True, vace=0, text=12):
    """Return `{key: shape}` of a small Wan 2.1; without `i2v`, no image branch, as in Wan 2.2."""
    linears = {
        "text_embedding.0": (d, text), "text_embedding.2": (d, d), "time_embedding.0": (d, 8),
        "time_embedding.2": (d, d), "time_projection.1": (6 * d, d), "head.head": (4 * 6, d),
    }  # fmt: skip
    first = {"patch_embedding.weight": (d, 6, 1, 2, 2), "patch_embedding.bias": (d,)}
    others = {"head.modulation": (1, 2, d)}
    sizes = {"d": d, "f": f}
    vaces = [f"vace_blocks.{number}" for number in range(vace)]
    for name in [*(f"blocks.{number}" for number in range(blocks)), *vaces]:
        for module, (out, inner) in _WAN_BLOCK.items():
            linears[f"{name}.{module}"] = sizes[out], sizes[inner]
        norms = [*_WAN_NORMS, "norm3"]
        if i2v:
            linears |= {f"{name}.cross_attn.{kind}_img": (d, d) for kind in "kv"}
            norms.append("cross_attn.norm_k_img")
        others |= {f"{name}.{norm}.weight": (d,) for norm in norms}
        others |= {f"{name}.norm3.bias": (d,), f"{name}.modulation": (1, 6, d)}
    if vace:
        linears |= {f"{name}.after_proj": (d, d) for name in vaces}
        linears["vace_blocks.0.before_proj"] = d, d
        others["vace_patch_embedding.weight"] = d, 10, 1, 2, 2
        others["vace_patch_embedding.bias"] = (d,)
    if i2v:
        linears |= {"img_emb.proj.1": (20, 20), "img_emb.proj.3": (d, 20)}
        for norm, size in (("img_emb.proj.0", 20), ("img_emb.proj.4", d)):
            others[f"{norm}.weight"] = others[f"{norm}.bias"] = (size,)
        others["img_emb.emb_pos"] = 1, 5, 20
    return _shapes({}, first) | _shapes(linears, others)


def qwen(blocks=2, d=16):
    """Return `{key: shape}` of a small Qwen-Image."""
    linears = {
        "time_text_embed.timestep_embedder.linear_1": (d, 8),
        "time_text_embed.timestep_embedder.linear_2": (d, d),
        "img_in": (d, 6), "txt_in": (d, 12), "norm_out.linear": (2 * d, d), "proj_out": (24, d),
    }  # fmt: skip
    others = {"txt_norm.weight": (12,)}
    projections = "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0"
    for name in (f"transformer_blocks.{number}" for number in range(blocks)):
        for stream in ("img", "txt"):
            linears[f"{name}.{stream}_mod.1"] = 6 * d, d
            linears[f"{name}.{stream}_mlp.net.0.proj"] = 4 * d, d
            linears[f"{name}.{stream}_mlp.net.2"] = d, 4 * d
        for module in (*projections, "to_add_out"):
            linears[f"{name}.attn.{module}"] = d, d
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            others[f"{name}.attn.{norm}.weight"] = (4,)
    return _shapes(linears, others)


def modules(shapes):
    """Names of all modules with a matrix, without the prefix."""
    return [
        key.removeprefix(PREFIX).removesuffix(".weight")
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) > 1
    ]


def diffusers_of_wan(shapes, *, rest=False):
    """Return `{diffusers' name: Wan's name}` of modules; with `rest`, of norms and tables."""
    block = WAN_DIFFUSERS_BLOCK_REST if rest else WAN_DIFFUSERS_BLOCK | WAN_DIFFUSERS_VACE
    top = WAN_DIFFUSERS_TOP_REST if rest else WAN_DIFFUSERS_TOP
    own = {key.removeprefix(PREFIX).removesuffix(".weight") for key in shapes}
    names = {theirs: ours for theirs, ours in top.items() if ours in own}
    for number in range(99):
        for kind in ("blocks", "vace_blocks"):
            for theirs, ours in block.items():
                if f"{kind}.{number}.{ours}" in own:
                    names[f"{kind}.{number}.{theirs}"] = f"{kind}.{number}.{ours}"
    return names


def flat(name):
    return name.replace(".", "_")


def _mixed(name):
    """Underscores up to the number of the block, dots after it."""
    words = name.split(".")
    if "blocks" not in words[0]:
        return name
    return f"{words[0]}_{'.'.join(words[1:])}"


def _compiled(name):
    """Each block compiled on its own."""
    return re.sub(r"(blocks\.\d+)(?=\.|$)", r"\1._orig_mod", name)


# Spellings of module names by trainers.
SPELLINGS = {
    "bare": lambda name: name,
    "diffusion_model": lambda name: f"diffusion_model.{name}",
    "transformer": lambda name: f"transformer.{name}",
    "kohya": lambda name: f"lora_unet_{flat(name)}",
    "wan-fun": lambda name: f"lora_unet__{flat(name)}",
    "mixed": lambda name: f"lora_unet_{_mixed(name)}",
    "peft": lambda name: f"base_model.model.{name}",
    "peft-of-comfyui": lambda name: f"base_model.model.diffusion_model.{name}",
    "diffsynth": lambda name: f"pipe.dit.{name}",
    "lycoris": lambda name: f"lycoris_{flat(name)}",
    "checkpoint": lambda name: f"model.diffusion_model.{name}",
    "onetrainer": lambda name: f"lora_transformer_{flat(name)}",
    "unet": lambda name: f"unet.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled-peft": lambda name: f"base_model.model._orig_mod.{name}",
    "compiled-in-comfyui": lambda name: f"diffusion_model._orig_mod.{name}",
    "compiled-kohya": lambda name: f"lora_unet__orig_mod_{flat(name)}",
    "compiled-blocks": lambda name: f"transformer.{_compiled(name)}",
    "compiled-blocks-kohya": lambda name: f"lora_unet_{flat(_compiled(name))}",
    "compiled-layers": lambda name: f"{name}._orig_mod",
    "ddp-layers": lambda name: f"{name}.module",
    "checkpointed-fsdp": lambda name: (
        f"_fsdp_wrapped_module.{name}._checkpoint_wrapped_module._orig_mod"
    ),
    "ddp": lambda name: f"module.{name}",
    "ddp-peft": lambda name: f"module.base_model.model.{name}",
    "ddp-compiled": lambda name: f"module._orig_mod.{_compiled(name)}",
    "compiled-ddp": lambda name: f"_orig_mod.module.base_model.model.diffusion_model.{name}",
    "ddp-inside": lambda name: f"diffusion_model.module.{name}",
    "ddp-kohya": lambda name: f"lora_unet_module_{flat(name)}",
}

# Endings of `up` and `down`.
ENDINGS = {
    "kohya": (".lora_up.weight", ".lora_down.weight"),
    "peft": (".lora_B.weight", ".lora_A.weight"),
    "peft-named": (".lora_B.default.weight", ".lora_A.default.weight"),
    "peft-other-name": (".lora_B.my_adapter_2.weight", ".lora_A.my_adapter_2.weight"),
    "peft-dotted-name": (".lora_B.my-style.v2.weight", ".lora_A.my-style.v2.weight"),
    "peft-bare-name": (".lora_B.my-style.v2", ".lora_A.my-style.v2"),
    "peft-words": (".lora_B.my style (bias).weight", ".lora_A.my style (bias).weight"),
    "kohya-dotted-name": (".lora_up.weight-1.5.weight", ".lora_down.weight-1.5.weight"),
    "kohya-named": (".lora_up.default.weight", ".lora_down.default.weight"),
    "diffusers-underscore": ("_lora.up.weight", "_lora.down.weight"),
    "diffusers-dot": (".lora.up.weight", ".lora.down.weight"),
    "diffusers-linear": (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
    "mochi": (".lora_B", ".lora_A"),
}


def random_pairs(shapes, names, rank=4, seed=0, dtype=torch.float32):
    """Return `{name: (up, down)}`, random: `up` `[out, rank, ...]`, `down` `[rank, in, ...]`."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name in names:
        out, *inner = shapes[f"{PREFIX}{name}.weight"]
        up = torch.randn(out, rank, *(1 for _ in inner[1:]), generator=generator)
        down = torch.randn(rank, *inner, generator=generator)
        pairs[name] = up.to(dtype), down.to(dtype)
    return pairs


def spelled(pairs, spelling="diffusion_model", ending="peft", alpha=None, names=None):
    """Return the tensors of a LoRA file in a dialect.

    Args:
        pairs: From `random_pairs`.
        spelling: Key of `SPELLINGS`.
        ending: Key of `ENDINGS`.
        alpha: Alpha of every pair; None: the file has no alphas.
        names: Names of modules in the file, where they differ from the model's.
    """
    tensors = {}
    for name, (up, down) in pairs.items():
        stem = SPELLINGS[spelling]((names or {}).get(name, name))
        tensors[stem + ENDINGS[ending][0]] = up.clone()
        tensors[stem + ENDINGS[ending][1]] = down.clone()
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(float(alpha))
    return tensors


def amounts_of(bank, *entries):
    """Return the strengths of a stack of (file number, block filter); default: all files."""
    entries = entries or [(number, "") for number in range(len(bank.files))]
    every = parse_schedule("1")
    stack = [StackEntry(bank.files[n].path, every, parse_blocks(text)) for n, text in entries]
    return Amounts(bank, stack)
