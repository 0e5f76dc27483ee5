"""A node for the tests, which their server loads beside ours: what a text encoder would give."""

import torch


class Conditioning:
    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802, the host's name
        return {"required": {"size": ("INT", {"default": 4096}), "seed": ("INT", {"default": 0})}}

    def make(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, 8, size, generator=generator), {}]],)


NODE_CLASS_MAPPINGS = {"Test_Conditioning": Conditioning}
