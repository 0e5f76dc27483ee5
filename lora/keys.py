"""The names in LoRA files, of any trainer, and the parameters of a model that they mean.

A key is a prefix, the name of a module and the name of a part. Names of parts are many and their
endings tell them apart. Prefixes and modules are not taken apart: what is left of a key when some
prefix is cut off either is the name of a module, with dots or with underscores in their place, or
it is not. So that `lora_unet_blocks_12.self_attn.k` is found as well as `transformer.blocks.12.
attn1.to_k`, and no name is ever guessed.

Sources of the dialects: kohya-ss sd-scripts and musubi-tuner (`lora_unet_`), Hugging Face PEFT
(`base_model.model.`, adapter names), diffusers' WanTransformer3DModel (`attn1`, `ffn.net`),
DiffSynth-Studio (`pipe.dit.`), LyCORIS (`lycoris_`), lightx2v (`diff_m`), Wan-Fun (`lora_unet__`).
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Axis, first index and length of the part of a weight that is meant.
Offset = tuple[int, int, int]


class Target(NamedTuple):
    """A parameter, by its key in the state dict; with an offset, some rows or columns of it."""

    key: str
    offset: Offset | None = None


# An adapter name may stand before ".weight", as in `lora_A.default.weight`. The bias that PEFT can
# train beside `lora_B` is another thing.
_MATRIX = r"(?:\.(?!bias$)\w+)??(?:\.weight)?"

# Endings of keys and the parts they name, `adapters.PARTS`.
_ENDINGS = [
    (rf"(?:[._]lora[._]up|\.lora_up|\.lora_linear_layer\.up|\.lora_B){_MATRIX}", "up"),
    (rf"(?:[._]lora[._]down|\.lora_down|\.lora_linear_layer\.down|\.lora_A){_MATRIX}", "down"),
    (r"\.lora_mid(?:\.weight)?", "mid"),
    (r"\.(?:lora_)?alpha", "alpha"),
    (r"\.dora_scale", "dora_scale"),
    (r"\.lora_magnitude_vector(?:\.\w+)??(?:\.weight)?", "magnitude"),
    (r"\.(hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2)(?:\.weight)?", ""),
    (r"\.([ab][12])\.weight", ""),
    (r"\.(oft_blocks|rescale)(?:\.weight)?", ""),
    (r"\.(reshape_weight|set_weight|diff_b|diff_m|diff|w_norm|b_norm)", ""),
]
_PARTS = [(re.compile(rf"(?P<stem>.+?){ending}$"), part) for ending, part in _ENDINGS]

_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "dit.",
    "transformer.",
    "unet.",
    "model.",
    "lora_unet__",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "diffusion_model_",
)

# Prefixes that one key has, at the most; a key of nothing else would take its length squared.
_MOST_PREFIXES = 16

# Of other models that come in the same file.
_TEXT_ENCODER = re.compile(r"(lora_te\d?_|text_encoders?[._\d]|te\d?[._]|clip_[lgh][._])")

# diffusers' names of the modules of Wan, beside Wan's own.
_WAN = [
    (r"self_attn\.(q|k|v)$", r"attn1.to_\1"),
    (r"self_attn\.o$", "attn1.to_out.0"),
    (r"self_attn\.(norm_[qk])$", r"attn1.\1"),
    (r"cross_attn\.(q|k|v)$", r"attn2.to_\1"),
    (r"cross_attn\.o$", "attn2.to_out.0"),
    (r"cross_attn\.(norm_[qk])$", r"attn2.\1"),
    (r"cross_attn\.([kv])_img$", r"attn2.add_\1_proj"),
    (r"cross_attn\.norm_k_img$", "attn2.norm_added_k"),
    (r"ffn\.0$", "ffn.net.0.proj"),
    (r"ffn\.2$", "ffn.net.2"),
    (r"norm3$", "norm2"),
    (r"before_proj$", "proj_in"),
    (r"after_proj$", "proj_out"),
    (r"modulation$", "scale_shift_table"),
]
_WAN_TOP = {
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}


def split_key(key: str) -> tuple[str, str] | None:
    """Divide a key of a file into what names a module and what names a part.

    `lora_unet_blocks_0.lora_down.weight` is `("lora_unet_blocks_0", "down")`. None: no part is
    known by the name.
    """
    for pattern, part in _PARTS:
        match = pattern.match(key)
        if match is not None:
            return match["stem"], part or match[2]
    return None


def is_of_text_encoder(stem: str) -> bool:
    """Whether a key is meant for a text encoder."""
    return _TEXT_ENCODER.match(stem) is not None


class Targets:
    """The parameters of a model by all the names that files have for them.

    They come with their shapes, as in the state dict; `more` are further names of weights, without
    ".weight". The `prefix` is before the names of the network's own modules.
    """

    def __init__(
        self,
        parameters: Mapping[str, tuple[int, ...]],
        more: Mapping[str, Target] | None = None,
        prefix: str = "diffusion_model.",
    ) -> None:
        self.shapes = {key: shape for key, shape in parameters.items() if key.startswith(prefix)}
        names = {key.removeprefix(prefix): key for key in self.shapes}
        wan = "blocks.0.self_attn.q.weight" in names
        self._exact: dict[str, Target | None] = {}
        self._flat: dict[str, Target | None] = {}
        for name, key in names.items():
            module, _, leaf = name.rpartition(".")
            if leaf in ("weight", "bias"):
                name = module if leaf == "weight" else ""
            if name:
                self._learn(name, Target(key))
        # What a model calls its own goes before what others call it.
        for name, key in list(names.items()) if wan else ():
            for other in _wan_names(name.removesuffix(".weight")):
                self._learn(other, Target(key), first=True)
        for name, target in (more or {}).items():
            self._learn(name, target, first=True)

    @functools.cached_property
    def fingerprint(self) -> int:
        """What is equal for models whose parameters are alike."""
        return hash((frozenset(self.shapes.items()), frozenset(self._exact.items())))

    def find(self, stem: str, part: str) -> Target | None:
        """The parameter of a key, by what `split_key` says of it; None: the model has none."""
        if part == "diff_m":
            return self._known(f"{stem}.modulation")
        found = self._known(stem)
        if part not in ("diff_b", "b_norm"):
            return found
        # A bias may be there without a weight that a file could name.
        key = f"{found.key.removesuffix('.weight')}.bias" if found is not None else ""
        if found is None or found.offset is not None or key not in self.shapes:
            return None
        return Target(key)

    def shape(self, target: Target) -> tuple[int, ...]:
        """Of what is meant of a parameter."""
        shape = list(self.shapes[target.key])
        if target.offset is not None:
            shape[target.offset[0]] = target.offset[2]
        return tuple(shape)

    def examples(self, count: int) -> list[str]:
        """Some names of modules that files could have."""
        names = [
            key.removesuffix(".weight") for key, shape in self.shapes.items() if len(shape) > 1
        ]
        return names[:count]

    def _learn(self, name: str, target: Target, *, first: bool = False) -> None:
        for table, known in ((self._exact, name), (self._flat, name.replace(".", "_"))):
            if known not in table:
                table[known] = target
            elif not first and table[known] != target:
                table[known] = None  # of two that look alike none is meant

    def _known(self, stem: str) -> Target | None:
        for name in _without_prefixes(stem):
            found = self._exact.get(name) or self._flat.get(name.replace(".", "_"))
            if found is not None:
                return found
        return None


def _without_prefixes(stem: str) -> Iterator[str]:
    """A name, and what is left of it when prefixes are cut off, the longest first."""
    waiting, seen = [stem], set()
    while waiting and len(seen) < _MOST_PREFIXES:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield name
        waiting += [name.removeprefix(each) for each in _PREFIXES if name.startswith(each)]


def _wan_names(name: str) -> Iterator[str]:
    """What diffusers calls a module, or a parameter, of Wan."""
    if name in _WAN_TOP:
        yield _WAN_TOP[name]
    match = re.match(r"((?:\w+_)?blocks\.\d+\.)(.+)$", name)
    if match is None:
        return
    for own, other in _WAN:
        named, count = re.subn(own, other, match[2])
        if count:
            yield match[1] + named
