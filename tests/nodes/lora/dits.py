"""Small diffusion models of ComfyUI's own classes with random weights, and inputs for them."""

import torch
from torch import nn

# Rows of the tests: the class in comfy.ldm, and how many gated MLPs the model below has of it.
MLPS = {
    "seedvr2": {"SwiGLUMLP": 3},
    "lumina2": {"FeedForward": 3},
    "hidream": {"FeedForwardSwiGLU": 7},
    "omnigen2": {"LuminaFeedForward": 4},
    "mochi": {"FeedForward": 3},
    "flux2": {"SiLUActivation": 3},
}


class Model(nn.Module):
    """What ComfyUI's models have in common: the network under this name."""

    def __init__(self, network):
        super().__init__()
        self.diffusion_model = network.eval().requires_grad_(False)


def patcher(name, dtype=torch.float32, operations=None):
    """A MODEL on the CPU, as loaders make it; None: with ComfyUI's layers that cast nothing."""
    import comfy.ops

    operations = comfy.ops.disable_weight_init if operations is None else operations
    network = _NETWORKS[name](dtype=dtype, device="cpu", operations=operations)
    _randomize(network)
    return model_of(network)


def model_of(network):
    """A MODEL of any network."""
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    return ModelPatcher(Model(network), load_device=cpu, offload_device=cpu)


@torch.inference_mode()
def output(name, model, dtype=torch.float32):
    """What the network gives as it stands, in float32."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    arguments, keywords = _INPUTS[name](noise)
    return model.model.diffusion_model(*arguments, **keywords).float()


def _randomize(network):
    """Weights that keep activations at about one."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                numbers = numbers / tensor[0].numel() ** 0.5
            else:
                numbers = 0.1 * numbers + (1 if name.endswith("weight") else 0)
            tensor.copy_(numbers)


def _seedvr2(**options):
    from comfy.ldm.seedvr.model import NaDiT

    return NaDiT(
        1e-5, 2, "swiglu", vid_dim=32, txt_in_dim=24, heads=2, head_dim=16, mm_layers=1,
        rope_dim=16, vid_out_norm=True, **options,
    )  # fmt: skip


def _lumina2(**options):
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        dim=48, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=1, multiple_of=16,
        qk_norm=True, cap_feat_dim=24, axes_dims=(8, 8, 8), axes_lens=(32, 32, 32), **options,
    )  # fmt: skip


def _hidream(**options):
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, caption_channels=[24, 24], text_emb_dim=24, num_routed_experts=2,
        num_activated_experts=1, axes_dims_rope=(8, 4, 4), max_resolution=(16, 16),
        llama_layers=[0, 1], **options,
    )  # fmt: skip


def _omnigen2(**options):
    from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel

    return OmniGen2Transformer2DModel(
        in_channels=4, hidden_size=48, num_layers=1, num_refiner_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=(8, 8, 8), axes_lens=(32, 32, 32),
        text_feat_dim=24, **options,
    )  # fmt: skip


def _mochi(**options):
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    # The hidden width is fixed there: 12288.
    return AsymmDiTJoint(
        hidden_size_x=32, hidden_size_y=16, depth=2, num_heads=2, mlp_ratio_x=12288 / 32,
        use_t5=True, t5_feat_dim=24, t5_token_length=8, learn_sigma=False, qk_norm=True,
        **options,
    )  # fmt: skip


def _flux2(**options):
    from comfy.ldm.flux.model import Flux

    # With the settings that ComfyUI reads off a file of it, so that its loader takes the weights.
    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=24, hidden_size=128,
        mlp_ratio=3.0, num_heads=1, depth=1, depth_single_blocks=1, axes_dim=[32, 32, 32, 32],
        theta=2000, patch_size=1, qkv_bias=False, guidance_embed=False, global_modulation=True,
        mlp_silu_act=True, ops_bias=False, txt_ids_dims=[3], **options,
    )  # fmt: skip


_NETWORKS = {
    "seedvr2": _seedvr2,
    "lumina2": _lumina2,
    "hidream": _hidream,
    "omnigen2": _omnigen2,
    "mochi": _mochi,
    "flux2": _flux2,
}

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
    "omnigen2": lambda noise: (
        (noise(1, 4, 8, 6), _TIME, noise(1, 5, 24), 5),
        {"ref_latents": [noise(1, 4, 4, 6)]},
    ),
    "mochi": lambda noise: (
        (noise(1, 4, 2, 4, 6), _TIME, noise(1, 8, 24), torch.ones(1, 8, dtype=torch.bool)),
        {"num_tokens": 8},
    ),
    "flux2": lambda noise: ((noise(1, 128, 4, 4), _TIME, noise(1, 5, 24)), {}),
}
