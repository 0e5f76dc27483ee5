"""The names in LoRA files of any trainer, and the parameters of a model that they refer to.

A key is a prefix, the name of a module and the name of a part. Parts have many names with known
endings. Prefixes and modules are not parsed: with some prefix removed, the rest of a key either is
the name of a module, with dots or underscores, or it is not. So `lora_unet_blocks_12.self_attn.k`
is found as well as `transformer.blocks.12.attn1.to_k`, and no name is guessed.

Sources of the dialects: kohya-ss sd-scripts and musubi-tuner (`lora_unet_`), Hugging Face PEFT
(`base_model.model.`, adapter names), diffusers' WanTransformer3DModel (`attn1`, `ffn.net`),
DiffSynth-Studio (`pipe.dit.`), LyCORIS (`lycoris_`), lightx2v (`diff_m`), Wan-Fun (`lora_unet__`),
PyTorch's wrappers (`_orig_mod`, `module.`).
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

# Prefix of the names of the network's modules.
NETWORK = "diffusion_model."

# Axis, start and length of a part of a weight.
Offset = tuple[int, int, int]


class Target(NamedTuple):
    """A parameter by its key in the state dict; with an offset, some rows or columns of it."""

    key: str
    offset: Offset | None = None


# An adapter name may precede ".weight", as in `lora_A.my-style.v2.weight`. The bias that PEFT can
# train with `lora_B`, and what describes a quantised matrix, are no matrices.
_MATRIX = r"(?!\.weight\.)(?:\.(?P<adapter>(?s:.+?)))??(?:\.weight)?"
_OTHER = re.compile(
    r"\.(?:bias|(?:weight_|input_)?scale(?:_(?:weight|input|inv|2))?|absmax|comfy_quant)$"
)
_SCALE = re.compile(r"(.+?)(?:\.weight)?[._]scale(?:_weight|_inv)?$")

# Endings of keys and the parts that they name.
_ENDINGS = [
    (rf"(?:[._]lora[._]up|\.lora_up|\.lora_linear_layer\.up|\.lora_B){_MATRIX}", "up"),
    (rf"(?:[._]lora[._]down|\.lora_down|\.lora_linear_layer\.down|\.lora_A){_MATRIX}", "down"),
    (rf"\.lora_mid{_MATRIX}", "mid"),
    (r"\.(?:lora_)?alpha", "alpha"),
    (r"\.dora_scale", "dora_scale"),
    (rf"\.lora_magnitude_vector{_MATRIX}", "magnitude"),
    (rf"\.(hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2){_MATRIX}", ""),
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
    "module.",
    "module_",
    "lora_unet__",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "diffusion_model_",
)

# Most prefixes of one key; a key of prefixes only would take time in the square of its length.
_MOST_PREFIXES = 16

# Segments that PyTorch's wrappers add to the name of a module, anywhere in it.
_WRAPPER = r"_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)"
_WRAPPERS = re.compile(rf"^(?:{_WRAPPER}[._])+|(?:[._]{_WRAPPER})+(?![^._])|(?:\.module)+(?=\.|$)")

# Words in the keys of kinds that are not supported.
_UNSUPPORTED = {
    "VeRA": "vera_lambda_[bd]|vera_[AB]", "IA3": "ia3_l|on_input", "AdaLoRA": "lora_E",
    "FourierFT": "fourierft_spectrum", "VB-LoRA": r"vblora_\w+", "RandLoRA": r"randlora_\w+",
    "DeLoRA": r"delora_\w+", "GraLoRA": r"gralora_\w+", "Poly": "poly_lora_[AB]|poly_router",
    "LoRA-XS": "(?:default_)?lora_latent_mapping", "HRA": "hra_u", "Bone": "bone_block",
    "MiSS": "miss_block", "C3A": "c3a_kernel", "RoAd": "road_theta", "SHiRA": "shira_weight",
    "PEFT's OFT": "oft_[Rs]", "PEFT's BOFT": "boft_[Rs]", "old OFT": "oft_diag",
    "Stand-In": "[qkvo]_loras", "SVDQuant": "qweight|wscales|smooth_factor",
}  # fmt: skip
_WORDS = re.compile(rf"(?:^|[._])(?:{'|'.join(f'({s})' for s in _UNSUPPORTED.values())})(?![^._])")

# Prefixes of text encoders in the same file.
_TEXT_ENCODER = re.compile(r"(lora_te\d?_|text_encoders?[._\d]|te\d?[._]|clip_[lgh][._])")

# diffusers' names of Wan's modules, for Wan's own names.
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


def split_key(key: str) -> tuple[str, str, str] | None:
    """Split `key` into module, part and the name of an adapter, if any; None: no known part."""
    for pattern, part in () if _OTHER.search(key) else _PARTS:
        match = pattern.match(key)
        if match is not None:
            return match["stem"], part or match[2], match.groupdict().get("adapter") or ""
    return None


def scales_of(keys: Collection[str]) -> dict[str, str]:
    """Return the keys of scales by the keys of the quantised matrices that they belong to."""
    found = [match for match in map(_SCALE.match, keys) if match]
    names = {f"{match[1]}{end}": match[0] for match in found for end in ("", ".weight")}
    return {name: key for name, key in names.items() if name in keys}


def unsupported_kinds(keys: Iterable[str]) -> dict[str, str]:
    """Return the names of unsupported kinds by the keys that show them, and by their modules."""
    kinds: dict[str, str] = {}
    for key in keys:
        if match := _WORDS.search(key):
            kinds[key] = kinds[key[: match.start()]] = [*_UNSUPPORTED][(match.lastindex or 1) - 1]
    return kinds


def is_of_text_encoder(key: str) -> bool:
    """Return whether `key` belongs to a text encoder."""
    return any(map(_TEXT_ENCODER.match, _without_prefixes(key)))


class Targets:
    """The parameters of a model, shapes by key, by all names that files use for them.

    `more` are further names of weights, without ".weight".
    """

    def __init__(
        self, parameters: Mapping[str, tuple[int, ...]], more: Mapping[str, Target] | None = None
    ) -> None:
        self.shapes = {key: shape for key, shape in parameters.items() if key.startswith(NETWORK)}
        names = {_WRAPPERS.sub("", key.removeprefix(NETWORK)): key for key in self.shapes}
        wan = "blocks.0.self_attn.q.weight" in names
        self._exact: dict[str, Target | None] = {}
        self._flat: dict[str, Target | None] = {}
        for name, key in names.items():
            module, _, leaf = name.rpartition(".")
            if leaf in ("weight", "bias"):
                name = module if leaf == "weight" else ""
            if name:
                self._learn(name, Target(key))
        # The model's own names take precedence over other names.
        for name, key in list(names.items()) if wan else ():
            for other in _wan_names(name.removesuffix(".weight")):
                self._learn(other, Target(key), first=True)
        for name, target in (more or {}).items():
            self._learn(name, target, first=True)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A hash that is equal for models with equal parameters."""
        return hash((frozenset(self.shapes.items()), frozenset(self._exact.items())))

    def find(self, stem: str, part: str) -> Target | None:
        """Return the parameter for `stem` and `part` of `split_key`; None: the model has none."""
        if part == "diff_m":
            return self._known(f"{stem}.modulation")
        found = self._known(stem)
        if part not in ("diff_b", "b_norm"):
            return found
        # A bias may exist without a weight that a file could name.
        key = f"{found.key.removesuffix('.weight')}.bias" if found is not None else ""
        if found is None or found.offset is not None or key not in self.shapes:
            return None
        return Target(key)

    def shape(self, target: Target) -> tuple[int, ...]:
        """Return the shape of `target`."""
        shape = list(self.shapes[target.key])
        if target.offset is not None:
            shape[target.offset[0]] = target.offset[2]
        return tuple(shape)

    def examples(self, count: int) -> list[str]:
        """Return up to `count` names of modules that files could use."""
        names = [key for key, shape in self.shapes.items() if len(shape) > 1][:count]
        return [name.removesuffix(".weight") for name in names]

    def _learn(self, name: str, target: Target, *, first: bool = False) -> None:
        for table, known in ((self._exact, name), (self._flat, name.replace(".", "_"))):
            if known not in table:
                table[known] = target
            elif not first and table[known] != target:
                table[known] = None  # of two equal names neither is used

    def _known(self, stem: str) -> Target | None:
        for name in _without_prefixes(stem):
            found = self._exact.get(name) or self._flat.get(name.replace(".", "_"))
            if found is not None:
                return found
        return None


def _without_prefixes(stem: str) -> Iterator[str]:
    """Yield a name without wrappers, and the rest of it without prefixes, the longest first."""
    waiting, seen = [_WRAPPERS.sub("", stem)], set()
    while waiting and len(seen) < _MOST_PREFIXES:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield name
        waiting += [name.removeprefix(each) for each in _PREFIXES if name.startswith(each)]


def _wan_names(name: str) -> Iterator[str]:
    """Yield diffusers' names for a module or a parameter of Wan."""
    if name in _WAN_TOP:
        yield _WAN_TOP[name]
    match = re.match(r"((?:\w+_)?blocks\.\d+\.)(.+)$", name)
    if match is None:
        return
    for own, other in _WAN:
        named, count = re.subn(own, other, match[2])
        if count:
            yield match[1] + named
