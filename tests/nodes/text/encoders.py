"""Small text encoders of ComfyUI's own classes, with random weights and real tokenizers."""

import functools
import importlib
import io
from types import SimpleNamespace

import torch

# A larger batch is summed in another order: float32 rounding through a few layers.
ROUNDING = 2e-6

FOX = "a red fox runs over the snow"
BOOK = "a (woman:1.3) reads a [book] beside the ((window)), soft shadows, film grain"
BLURRY = "blurry, low quality"

# Training text of the sentencepiece model, which thus has pieces for words of the prompts.
SENTENCES = [
    "a red fox runs over the snow in the morning light",
    "a woman reads a book beside the window, soft shadows, film grain",
    "blurry, low quality, watermark, extra fingers, distorted",
    "waves break on the rocks while the camera moves slowly to the left",
]

_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_LLAMA = _CLIP | {"num_key_value_heads": 1}
_UMT5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}

# Module, class or factory of the model, class of the tokenizer, configured parts, and their small
# configuration.
_KINDS = {
    "wan": (
        "text_encoders.wan", "te", "WanT5Tokenizer", ["umt5xxl"], {**_UMT5, "vocab_size": 256},
    ),
    "qwen_image": (
        "text_encoders.qwen_image", "te", "QwenImageTokenizer", ["qwen25_7b"], _LLAMA,
    ),
    "z_image": ("text_encoders.z_image", "te", "ZImageTokenizer", ["qwen3_4b"], _LLAMA),
    # It uses the states of layers 9, 18 and 27.
    "klein": (
        "text_encoders.flux", "klein_te", "KleinTokenizer", ["qwen3_4b"],
        {**_LLAMA, "num_hidden_layers": 28},
    ),
    "sd1": ("sd1_clip", "SD1ClipModel", "SD1Tokenizer", ["clip_l"], _CLIP),
    "sdxl": ("sdxl_clip", "SDXLClipModel", "SDXLTokenizer", ["clip_l", "clip_g"], _CLIP),
    "flux": (
        "text_encoders.flux", "flux_clip", "FluxTokenizer", ["clip_l", "t5xxl"], {**_CLIP, **_UMT5},
    ),
}  # fmt: skip


def encoder(kind, dtype=torch.float32, seed=0, **config):
    """Return a CLIP of ComfyUI; `config` overrides the small configuration."""
    import comfy.sd

    file, model, tokenizer, parts, small = _KINDS[kind]
    module = importlib.import_module(f"comfy.{file}")
    known, model = small | config, getattr(module, model)
    clip = comfy.sd.CLIP(
        SimpleNamespace(
            params={},
            clip=model if isinstance(model, type) else model(),
            tokenizer=lambda **_: _tokenizer(getattr(module, tokenizer)),
        ),
        model_options={"dtype": dtype, **{f"{part}_model_config": known for part in parts}},
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in clip.cond_stage_model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = _scaled(name, values, config.get("d_kv", _UMT5["d_kv"])).to(dtype)
    return clip


def count(clip):
    """Return a list that gets the batch size of every later transformer call of a CLIP."""
    from comfy.sd1_clip import SDClipModel

    calls = []
    for module in clip.cond_stage_model.modules():
        if isinstance(module, SDClipModel):
            module.transformer.register_forward_pre_hook(
                lambda _, __, keywords: calls.append(len(keywords["embeds"])), with_kwargs=True
            )
    return calls


@functools.cache
def _tokenizer(cls):
    """Return a tokenizer, cached: reading its files takes longer than most tests."""
    return cls(tokenizer_data={"spiece_model": _spiece()})


@functools.cache
def _spiece():
    """Return a sentencepiece model with umT5's special tokens: pad 0, end 1."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=80,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8)


def _scaled(name, values, d_kv):
    """Scale random weights so that a layer keeps the magnitude of its input."""
    if "norm" in name:
        return 1 + 0.2 * values
    if values.ndim < 2:
        return 0.2 * values
    # T5 does not scale its attention; the query weights include the factor.
    return values * values.shape[-1] ** -0.5 * (d_kv**-0.5 if "SelfAttention.q." in name else 1)


def encode(clip, positive, negative="", **options):
    """Execute the node; return two lists of conditionings, and the report."""
    from fast_video_vae.nodes.text.nodes import TextEncode

    inputs = {"clip": clip, "positive": positive, "negative": negative, **options}
    lists = {key: listed(value) for key, value in inputs.items()}
    return TextEncode.PREPARE_CLASS_CLONE(None).execute(**lists).args


def listed(value):
    return value if isinstance(value, list) else [value]


def by_core(clip, prompt):
    from fast_video_vae.tests.nodes.vae.pairs import node

    (conditioning,) = node("CLIPTextEncode", clip, prompt)
    return conditioning
