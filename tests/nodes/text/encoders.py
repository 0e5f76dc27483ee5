"""Small text encoders of ComfyUI's own classes, with random weights and real tokenizers."""

import functools
import io
from types import SimpleNamespace

import torch

# What the sentencepiece model of the tests is trained on: it has pieces for words such as these.
SENTENCES = [
    "a red fox runs over the snow in the morning light",
    "a woman reads a book beside the window, soft shadows, film grain",
    "blurry, low quality, watermark, extra fingers, distorted",
    "waves break on the rocks while the camera moves slowly to the left",
]

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_UMT5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}


def encoder(kind, dtype=torch.float32, seed=0, **config):
    """A CLIP of ComfyUI.

    Args:
        kind: "wan", "qwen_image", "z_image", "klein", "sd1", "sdxl" or "flux".
        dtype: Of the weights.
        seed: Of the weights.
        config: Of the transformer, in place of what makes it small.
    """
    import comfy.sd

    model, tokenizer, options = _KINDS[kind](config)
    clip = comfy.sd.CLIP(
        SimpleNamespace(params={}, clip=model, tokenizer=lambda **_: _tokenizer(tokenizer)),
        model_options={"dtype": dtype, **options},
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in clip.cond_stage_model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = _scaled(name, values, config.get("d_kv", _UMT5["d_kv"])).to(dtype)
    return clip


def count(clip):
    """Forward calls of the transformers of a CLIP from here on, in a list of their batch sizes."""
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
    """Shared by all encoders of a kind: to read its files takes longer than most tests."""
    return cls(tokenizer_data={"spiece_model": _spiece()})


@functools.cache
def _spiece():
    """A sentencepiece model with umT5's special tokens: pad 0, end 1."""
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
    """Random numbers as large as those of a trained encoder: what a layer gives is what it gets."""
    if "norm" in name:
        return 1 + 0.2 * values
    if values.ndim < 2:
        return 0.2 * values
    # T5 has no scale in its attention; its weights make up for it.
    return values * values.shape[-1] ** -0.5 * (d_kv**-0.5 if "SelfAttention.q." in name else 1)


def _wan(config):
    from comfy.text_encoders import wan

    options = {"umt5xxl_model_config": {**_UMT5, "vocab_size": 256, **config}}
    return wan.te(), wan.WanT5Tokenizer, options


def _qwen_image(config):
    from comfy.text_encoders import qwen_image

    return (
        qwen_image.te(),
        qwen_image.QwenImageTokenizer,
        {"qwen25_7b_model_config": {**_LLAMA, **config}},
    )


def _z_image(config):
    from comfy.text_encoders import z_image

    options = {"qwen3_4b_model_config": {**_LLAMA, **config}}
    return z_image.te(), z_image.ZImageTokenizer, options


def _klein(config):
    from comfy.text_encoders import flux

    # It takes the states of layers 9, 18 and 27.
    options = {"qwen3_4b_model_config": {**_LLAMA, "num_hidden_layers": 28, **config}}
    return flux.klein_te(), flux.KleinTokenizer, options


def _sd1(config):
    from comfy import sd1_clip

    options = {"clip_l_model_config": {**_CLIP, **config}}
    return sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer, options


def _sdxl(config):
    from comfy import sdxl_clip

    options = {f"clip_{name}_model_config": {**_CLIP, **config} for name in "lg"}
    return sdxl_clip.SDXLClipModel, sdxl_clip.SDXLTokenizer, options


def _flux(config):
    from comfy.text_encoders import flux

    options = {"clip_l_model_config": _CLIP, "t5xxl_model_config": {**_UMT5, **config}}
    return flux.flux_clip(torch.float32), flux.FluxTokenizer, options


_KINDS = {
    "wan": _wan,
    "qwen_image": _qwen_image,
    "z_image": _z_image,
    "klein": _klein,
    "sd1": _sd1,
    "sdxl": _sdxl,
    "flux": _flux,
}
