"""Small diffusion models of ComfyUI's own classes with random weights, and inputs for them."""

import importlib

import torch
from torch import nn

# Rows of the tests: the class in comfy.ldm, and how many gated MLPs the model below has of it.
MLPS = {
    "seedvr2": {"SwiGLUMLP": 3},
    "lumina2": {"FeedForward": 3},
    "hidream": {"FeedForwardSwiGLU": 7},
    "flux2": {"SiLUActivation": 3},
}


class Model(nn.Module):
    """The common part of ComfyUI's models: the network under this name."""

    def __init__(self, network):
        super().__init__()
        self.diffusion_model = network.eval().requires_grad_(False)


def patcher(name, dtype=torch.float32, operations=None):
    """A MODEL on the CPU, as loaders make it; None: with ComfyUI's layers that cast nothing."""
    import comfy.ops

    operations = comfy.ops.disable_weight_init if operations is None else operations
    network = random_network(*_NETWORKS[name], dtype=dtype, operations=operations)
    return model_of(network)


def model_of(network):
    """A MODEL of any network."""
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    return ModelPatcher(Model(network), load_device=cpu, offload_device=cpu)


@torch.inference_mode()
def output(name, model, dtype=torch.float32):
    """Return the output of the network in float32."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    arguments, keywords = _INPUTS[name](noise)
    return model.model.diffusion_model(*arguments, **keywords).float()


def random_network(path, settings, seed=0, **options):
    """A network of a class in comfy.ldm, whose weights keep activations at about one."""
    file, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(f"comfy.ldm.{file}"), name)
    network = cls(**settings, device="cpu", **options)
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in network.state_dict().items():
        if "motion_encoder" in key:
            tensor.zero_()  # 30 M numbers, for the pixels of a face that no test shows
        elif tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=generator)
            if key.endswith("modulation"):
                numbers = 0.3 * numbers
            elif tensor.ndim > 1:
                numbers = numbers / tensor[0].numel() ** 0.5
            else:
                numbers = 0.1 * numbers + (1 if key.endswith("weight") else 0)
            tensor.copy_(numbers)
    return network


# The class in comfy.ldm, and its arguments.
_NETWORKS = {
    "seedvr2": ("seedvr.model.NaDiT", {
        "norm_eps": 1e-5, "num_layers": 2, "mlp_type": "swiglu", "vid_dim": 32, "txt_in_dim": 24,
        "heads": 2, "head_dim": 16, "mm_layers": 1, "rope_dim": 16, "vid_out_norm": True,
    }),
    "lumina2": ("lumina.model.NextDiT", {
        "dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 1,
        "multiple_of": 16, "qk_norm": True, "cap_feat_dim": 24, "axes_dims": (8, 8, 8),
        "axes_lens": (32, 32, 32),
    }),
    "hidream": ("hidream.model.HiDreamImageTransformer2DModel", {
        "patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "attention_head_dim": 16, "num_attention_heads": 2, "caption_channels": [24, 24],
        "text_emb_dim": 24, "num_routed_experts": 2, "num_activated_experts": 1,
        "axes_dims_rope": (8, 4, 4), "max_resolution": (16, 16), "llama_layers": [0, 1],
    }),
    # The settings that ComfyUI detects from the weights, so its loader accepts them.
    "flux2": ("flux.model.Flux", {
        "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 24,
        "hidden_size": 128, "mlp_ratio": 3.0, "num_heads": 1, "depth": 1,
        "depth_single_blocks": 1, "axes_dim": [32, 32, 32, 32], "theta": 2000, "patch_size": 1,
        "qkv_bias": False, "guidance_embed": False, "global_modulation": True,
        "mlp_silu_act": True, "ops_bias": False, "txt_ids_dims": [3],
    }),
}  # fmt: skip

_TIME = torch.tensor([0.6])

# Positional arguments and keywords of the forward, from a function that makes noise.
_INPUTS = {
    "seedvr2": lambda noise: (
        (noise(1, 16, 1, 4, 4), _TIME * 1000, noise(1, 5, 24)),
        {
            "condition": noise(1, 17, 1, 4, 4),
            "transformer_options": {"cond_or_uncond": [0]},
        },
    ),
    "lumina2": lambda noise: ((noise(1, 4, 8, 6), _TIME, noise(1, 5, 24), 5), {}),
    "hidream": lambda noise: (
        (noise(1, 4, 8, 8), _TIME * 1000, noise(1, 24), noise(1, 5, 24), noise(1, 2, 5, 24)),
        {},
    ),
    "flux2": lambda noise: ((noise(1, 128, 4, 4), _TIME, noise(1, 5, 24)), {}),
}
