"""A small SeedVR2 of ComfyUI's own classes; the server of the tests loads this file too."""

import torch

# Of ComfyUI's class NaDiT; the conditioning has the published size.
WIDTHS = {"vid_dim": 32, "heads": 2, "head_dim": 16, "rope_dim": 16, "num_layers": 2}
MORE = {"norm_eps": 1e-5, "mlp_type": "swiglu", "mm_layers": 1, "vid_out_norm": True}


def seedvr2_model(seed=0):
    """A MODEL with random weights on the CPU."""
    import comfy.model_base
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    config = comfy.supported_models.SeedVR2({"image_model": "seedvr2", **WIDTHS, **MORE})
    config.set_inference_dtype(torch.float32, None)
    model = comfy.model_base.SeedVR2(config, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.diffusion_model.state_dict().items():
        if tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                tensor.copy_(numbers / tensor[0].numel() ** 0.5)
            else:
                tensor.copy_(0.1 * numbers + (1 if name.endswith("weight") else 0))
    cpu = torch.device("cpu")
    return ModelPatcher(model, load_device=cpu, offload_device=cpu)
