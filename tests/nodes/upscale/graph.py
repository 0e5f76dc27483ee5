"""ComfyUI's graph that upscales a video with SeedVR2, and our node."""

from fast_video_vae.tests.nodes.vae.pairs import node, v3_node

# What the node has by default.
KSAMPLER = {"steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}


def stock_graph(
    images, model, vae, *, multiplier, seed, window, overlap, color="lab", scale_method="lanczos",
    **sampling,
):  # fmt: skip
    """The IMAGE of ComfyUI's graph for one scene, an IMAGE."""
    seedvr = lambda name, **inputs: v3_node("nodes_seedvr", name, **inputs)  # noqa: E731
    kind = {"resize_type": "scale by multiplier", "multiplier": multiplier}
    (resized,) = v3_node(
        "nodes_post_processing",
        "ResizeImageMaskNode",
        input=images,
        scale_method=scale_method,
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
        options = KSAMPLER | sampling
        options |= {"positive": positive, "negative": negative, "seed": seed}
        sampled += node("KSampler", model=model, latent_image=chunk, **options)
    (merged,) = seedvr("SeedVR2TemporalMerge", latents=sampled, temporal_overlap=[shared])
    (decoded,) = node("VAEDecode", samples=merged, vae=vae)
    inputs = {"original_resized_images": resized, "color_correction_method": color}
    return seedvr("SeedVR2PostProcessing", images=decoded, **inputs)[0]


def upscale(video, model, vae, **inputs):
    """The file that our node writes, with the defaults of its widgets."""
    from fast_video_vae.nodes.upscale.nodes import UpscaleVideo

    schema = UpscaleVideo.define_schema().inputs
    defaults = {each.id: each.default for each in schema if hasattr(each, "default")}
    inputs = defaults | {"video": video, "model": model, "vae": vae} | inputs
    made = UpscaleVideo.PREPARE_CLASS_CLONE({"hidden_inputs": {}}).execute(**inputs)
    return made.args[0].get_stream_source()
