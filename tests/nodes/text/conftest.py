"""The node that encodes prompts, with small encoders and an empty cache."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(monkeypatch, comfyui):
    """An empty cache for the node."""
    from comfy.text_encoders import llama

    from fast_video_vae.nodes.text import encode
    from fast_video_vae.nodes.text.cache import TextCache

    # Text does not need the vision tower of Qwen-VL, which has 0.6 G parameters.
    monkeypatch.setattr(llama.qwen_vl, "Qwen2VLVisionTransformer", lambda **_: torch.nn.Identity())
    monkeypatch.setattr(encode, "cache", TextCache())
    with torch.inference_mode():
        yield encode.cache
