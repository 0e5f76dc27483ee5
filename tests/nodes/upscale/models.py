"""A small SeedVR2 of ComfyUI's own classes, and what ComfyUI's graph makes of a video with it."""

import torch

from fast_video_vae.tests.nodes.vae.pairs import node, v3_node

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


def stock_graph(images, model, vae, *, multiplier, seed, window, overlap, color="lab"):
    """The IMAGE of ComfyUI's graph for one scene, an IMAGE."""
    seedvr = lambda name, **inputs: v3_node("nodes_seedvr", name, **inputs)  # noqa: E731
    kind = {"resize_type": "scale by multiplier", "multiplier": multiplier}
    (resized,) = v3_node(
        "nodes_post_processing",
        "ResizeImageMaskNode",
        input=images,
        scale_method="lanczos",
        resize_type=kind,
    )
    (padded,) = seedvr("SeedVR2Preprocess", resized_images=resized)
    (latent,) = node("VAEEncode", pixels=padded, vae=vae)
    mode = {"chunking_mode": "manual", "frames_per_chunk": window}
    chunks, shared = seedvr(
        "SeedVR2TemporalChunk", latent=latent, temporal_overlap=overlap, chunking_mode=mode
    )
    sampled = []
    for chunk in chunks:
        positive, negative = seedvr("SeedVR2Conditioning", model=model, vae_conditioning=chunk)
        options = {"steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
        options |= {"positive": positive, "negative": negative, "denoise": 1.0, "seed": seed}
        sampled += node("KSampler", model=model, latent_image=chunk, **options)
    (merged,) = seedvr("SeedVR2TemporalMerge", latents=sampled, temporal_overlap=[shared])
    (decoded,) = node("VAEDecode", samples=merged, vae=vae)
    inputs = {"original_resized_images": resized, "color_correction_method": color}
    return seedvr("SeedVR2PostProcessing", images=decoded, **inputs)[0]
