"""Small text encoders of ComfyUI's own classes, with random weights and real tokenizers."""

import functools
import importlib
import io
from types import SimpleNamespace

import torch

# Training text of the sentencepiece model, which thus has pieces for words of the prompts.
SENTENCES = [
    "a red fox runs over the snow in the morning light",
    "a woman reads a book beside the window, soft shadows, film grain",
    "blurry, low quality, watermark, extra fingers, distorted",
    "waves break on the rocks while the camera moves slowly to the left",
]

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, **_HEADS}
_T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}
_UMT5 = {**_T5, "vocab_size": 256}

# Module, class or factory of the model, class of the tokenizer, and the configuration of each part.
KINDS = {
    "wan": ("text_encoders.wan", "te", "WanT5Tokenizer", {"umt5xxl": _UMT5}),
    "z_image": ("text_encoders.z_image", "te", "ZImageTokenizer", {"qwen3_4b": _CLIP}),
    "sd1": ("sd1_clip", "SD1ClipModel", "SD1Tokenizer", {"clip_l": _CLIP}),
    "sdxl": ("sdxl_clip", "SDXLClipModel", "SDXLTokenizer", {"clip_l": _CLIP, "clip_g": _CLIP}),
}


def encoder(kind, dtype=torch.float32, seed=0, **config):
    """Return a CLIP of ComfyUI; `config` overrides the small configuration."""
    import comfy.sd

    file, model, tokenizer, parts = KINDS[kind]
    module = importlib.import_module(f"comfy.{file}")
    model, tokenizer = getattr(module, model), getattr(module, tokenizer)
    target = SimpleNamespace(
        params={},
        clip=model if isinstance(model, type) else model(),
        tokenizer=lambda **_: _tokenizer(tokenizer),
    )
    configs = {f"{part}_model_config": small | config for part, small in parts.items()}
    clip = comfy.sd.CLIP(target, model_options={"dtype": dtype, **configs})
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in clip.cond_stage_model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if values.ndim < 2:
            values = ("norm" in name) + 0.2 * values
        else:  # a layer keeps the magnitude of its input; T5 does not scale its attention
            d_kv = config.get("d_kv", _T5["d_kv"]) if "SelfAttention.q." in name else 1
            values *= (values.shape[-1] * d_kv) ** -0.5
        parameter.data = values.to(dtype)
    return clip


@functools.cache
def _tokenizer(cls):
    """Return a tokenizer, cached: reading its files takes longer than most tests."""
    import sentencepiece

    model, ids = io.BytesIO(), {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}  # umT5's
    options = {"vocab_size": 80, "hard_vocab_limit": False, "minloglevel": 2, **ids}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, **options
    )
    pieces = torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8)
    return cls(tokenizer_data={"spiece_model": pieces})
