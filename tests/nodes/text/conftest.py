"""The node that encodes prompts, with small encoders, an empty cache and no failed compilation."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(monkeypatch, comfyui):
    from comfy.text_encoders import llama

    from fast_video_vae.nodes.text import batch, encode

    # Text does not need the vision tower of Qwen-VL, which has 0.6 G parameters.
    monkeypatch.setattr(llama.qwen_vl, "Qwen2VLVisionTransformer", lambda **_: torch.nn.Identity())
    monkeypatch.setattr(encode, "cache", encode.TextCache())
    monkeypatch.setattr(batch, "_compiling", {"works": True})
    with torch.inference_mode():
        yield encode.cache
