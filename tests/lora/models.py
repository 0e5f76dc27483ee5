"""Parameter names of small Wan models, and their spellings in LoRA files.

The table of diffusers' names is independent of the library's: it is from diffusers' converter
(`convert_wan_to_diffusers.py`), and maps in the opposite direction.
"""

import re

import torch

PREFIX = "diffusion_model."

# diffusers' names of Wan's modules and tables, in a block and outside, for Wan's own names.
_BLOCK = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o", "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v", "attn2.to_out.0": "cross_attn.o",
    "attn1.norm_q": "self_attn.norm_q", "attn1.norm_k": "self_attn.norm_k",
    "attn2.norm_q": "cross_attn.norm_q", "attn2.norm_k": "cross_attn.norm_k",
    "attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
    "norm2": "norm3",  # Wan applies its norms in the order 1, 3, 2
    "scale_shift_table": "modulation", "proj_in": "before_proj", "proj_out": "after_proj",
}  # fmt: skip
_TOP = {
    "time_embedder.linear_1": "time_embedding.0", "time_embedder.linear_2": "time_embedding.2",
    "text_embedder.linear_1": "text_embedding.0", "text_embedder.linear_2": "text_embedding.2",
    "image_embedder.norm1": "img_emb.proj.0", "image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "image_embedder.ff.net.2": "img_emb.proj.3", "image_embedder.norm2": "img_emb.proj.4",
    "image_embedder.pos_embed": "img_emb.emb_pos", "time_proj": "time_projection.1",
}  # fmt: skip
_TOP = {f"condition_embedder.{theirs}": ours for theirs, ours in _TOP.items()}
_TOP |= {"proj_out": "head.head", "scale_shift_table": "head.modulation"}


def wan(blocks=2, d=16, f=24, *, i2v=True, vace=0):
    """Return `{key: shape}` of a Wan 2.1; without `i2v` without image branch, as Wan 2.2."""
    inside = [name for name in _BLOCK.values() if not name.endswith("_proj")]
    names = [*_TOP.values(), *(f"blocks.{n}.{name}" for n in range(blocks) for name in inside)]
    for n in range(vace):
        names += [f"vace_blocks.{n}.{name}" for name in (*inside, "after_proj")]
    names += ["vace_blocks.0.before_proj"] if vace else []
    shapes = {"patch_embedding.weight": (d, 6, 1, 2, 2), "patch_embedding.bias": (d,)}
    for name in (name for name in names if i2v or "img" not in name):
        out, inner = (f if name.endswith(f"ffn.{n}") else d for n in (0, 2))
        if name.endswith(("modulation", "emb_pos")):
            shapes[name] = 1, 6, d
        elif "norm_" in name:
            shapes[f"{name}.weight"] = (d,)
        else:
            vector = name.endswith(("norm3", "proj.0", "proj.4"))
            shapes[f"{name}.weight"] = (d,) if vector else (out, inner)
            shapes[f"{name}.bias"] = (out,)
    return {f"{PREFIX}{key}": shape for key, shape in shapes.items()}


def own_names(shapes):
    """Return `{name: key}` of weights by their module, and of other parameters but biases."""
    names = {key.removeprefix(PREFIX).removesuffix(".weight"): key for key in shapes}
    return {name: key for name, key in names.items() if not name.endswith(".bias")}


def modules(shapes):
    """Names of all modules with a matrix, without the prefix."""
    names = own_names(shapes).items()
    return [name for name, key in names if key.endswith(".weight") and len(shapes[key]) > 1]


def diffusers_of_wan(shapes):
    """Return `{diffusers' name: Wan's name}` of modules and tables."""
    names, own = dict(_TOP), own_names(shapes)
    for block in re.findall(r"(?:vace_)?blocks\.\d+(?=\.ffn\.0)", " ".join(own)):
        names |= {f"{block}.{theirs}": f"{block}.{ours}" for theirs, ours in _BLOCK.items()}
    return {theirs: ours for theirs, ours in names.items() if ours in own}


# Names of modules as trainers write them: with dots, underscores, underscores up to the number of
# the block; and with the wrappers of PyTorch, also of each block.
SPELLINGS = (
    "{name}", "diffusion_model.{name}", "model.diffusion_model.{name}", "transformer.{name}",
    "unet.{name}", "pipe.dit.{name}", "base_model.model.{name}",
    "base_model.model.diffusion_model.{name}",
    "lora_unet_{flat}", "lora_unet__{flat}", "lora_unet_{mixed}", "lora_transformer_{flat}",
    "lycoris_{flat}",
    "_orig_mod.{name}", "base_model.model._orig_mod.{name}", "diffusion_model._orig_mod.{name}",
    "lora_unet__orig_mod_{flat}", "transformer.{compiled}", "lora_unet_{flat_compiled}",
    "{name}._orig_mod", "_fsdp_wrapped_module.{name}._checkpoint_wrapped_module._orig_mod",
    "{name}.module", "module.{name}", "module.base_model.model.{name}",
    "module._orig_mod.{compiled}", "_orig_mod.module.base_model.model.diffusion_model.{name}",
    "diffusion_model.module.{name}", "lora_unet_module_{flat}",
)  # fmt: skip

# Endings of `up` and `down`, also with the name of an adapter.
ENDINGS = (
    ".lora_{up}.weight", ".lora_{B}.weight", ".lora_{B}", "_lora.{up}.weight", ".lora.{up}.weight",
    ".lora_linear_layer.{up}.weight", ".lora_{up}.default.weight", ".lora_{B}.my-style.v2.weight",
    ".lora_{B}.my-style.v2", ".lora_{B}.my style (bias).weight", ".lora_{up}.weight-1.5.weight",
)  # fmt: skip


def stem_of(name, spelling):
    """Return the name of a module in a spelling."""
    compiled = re.sub(r"(blocks\.\d+)(?=\.|$)", r"\1._orig_mod", name)
    flat, flat_compiled = name.replace(".", "_"), compiled.replace(".", "_")
    mixed = re.sub(r"^(\w*blocks)\.", r"\1_", name)
    names = {"flat": flat, "mixed": mixed, "compiled": compiled, "flat_compiled": flat_compiled}
    return spelling.format(name=name, **names)


def endings_of(ending):
    """Return the endings of `up` and `down`."""
    return ending.format(up="up", B="B"), ending.format(up="down", B="A")


def ones(shapes, names, rank=4):
    """Return `{name: (up, down)}`: `up` `[out, rank]`, `down` `[rank, in, ...]`."""
    sizes = {name: shapes[f"{PREFIX}{name}.weight"] for name in names}
    return {
        name: (torch.ones(out, rank), torch.ones(rank, *inner))
        for name, (out, *inner) in sizes.items()
    }


def spelled(pairs, spelling="diffusion_model.{name}", ending=".lora_{B}.weight", alpha=None):
    """Return the tensors of a LoRA file; `alpha`: of every pair, if the file has alphas."""
    tensors = {}
    for name, pair in pairs.items():
        stem = stem_of(name, spelling)
        for end, tensor in zip(endings_of(ending), pair, strict=True):
            tensors[stem + end] = tensor.clone()
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(float(alpha))
    return tensors
