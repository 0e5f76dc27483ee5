"""Workflow: upscaling of a video with SeedVR2 in one step and the fast VAE."""

from .files import SEEDVR2, SEEDVR2_VAE
from .graph import FAST, Graph
from .picture import Block

TEXT = """
## Upscale a video with SeedVR2

Choose a video in **Load Video**, press **Run**. The result goes to `output/video`, with its audio,
as AV1 in **10 bits**, which keeps smooth areas smooth.

ComfyUI's SeedVR2 nodes with four of ours: **Load VAE (Fast)**, **VAE Encode (Fast)** and **VAE
Decode (Fast)** need no tiles, so there are no seams; **Fuse SwiGLU MLPs (Fast)** takes fewer passes
over memory.

### Files

FILES

### What to change

- **Size**: `multiplier` of **Resize**.
- **Long videos**: **Split SeedVR2 Latent** samples as many frames at a time as fit; set its
  overlap to 0 for videos with hard cuts. **Trim Video** after **Load Video** takes a part.
- **Colours**: `lab` keeps those of the original, `none` the model's.
"""

_BLOCKS = (
    (Block("Video"),),
    (Block("VAE Encode (Fast)", "without tiles", fast=True),),
    (Block("Fuse MLPs (Fast)", "SeedVR2 3B, one step", fast=True),),
    (Block("VAE Decode (Fast)", "without tiles, 10 bits", fast=True),),
)


def graph() -> Graph:
    """A video in, four times its pixels out."""
    graph = Graph("8 SeedVR2 - upscale a video", TEXT, _BLOCKS)

    column = graph.column(420)
    clip = column.group("1   Video").add("LoadVideo", least=360, file="video.mp4")

    column = graph.column(360)
    size = column.group("2   Enlarge")
    parts = size.add("GetVideoComponents", video=clip)
    larger = size.add(
        "ResizeImageMaskNode",
        "Resize",
        input=parts["images"],
        resize_type="scale by multiplier",
        scale_method="lanczos",
        **{"resize_type.multiplier": 2},
    )
    padded = size.add("SeedVR2Preprocess", resized_images=larger)
    fast = column.group("3   The fast VAE", FAST)
    vae = fast.add("FastVAE_Load", vae_name=SEEDVR2_VAE)
    latent = fast.add("FastVAE_Encode", pixels=padded, vae=vae)
    parted = column.group("4   Sampling in parts")
    chunks = parted.add(
        "SeedVR2TemporalChunk", latent=latent, temporal_overlap=2, chunking_mode="auto"
    )

    column = graph.column(360)
    sampling = column.group("5   One step")
    model = sampling.add("UNETLoader", unet_name=SEEDVR2)
    model = sampling.add("FastVAE_FuseMLP", model=model)
    words = sampling.add("SeedVR2Conditioning", model=model, vae_conditioning=chunks["latents"])
    sampled = sampling.add(
        "KSampler",
        model=model,
        positive=words["positive"],
        negative=words["negative"],
        latent_image=chunks["latents"],
        seed=42,
        control_after_generate="fixed",
        steps=1,
        cfg=1,
        sampler_name="euler",
        scheduler="simple",
        denoise=1,
    )
    whole = sampling.add(
        "SeedVR2TemporalMerge", latents=sampled, temporal_overlap=chunks["temporal_overlap"]
    )

    column = graph.column(400)
    result = column.group("6   Result")
    images = result.add("FastVAE_Decode", samples=whole, vae=vae)
    finished = result.add(
        "SeedVR2PostProcessing",
        images=images,
        original_resized_images=larger,
        color_correction_method="lab",
    )
    sound_and_rate = {name: parts[name] for name in ("audio", "fps")}
    result.save_video(300, "seedvr2", "av1", images=finished, bit_depth=10, **sound_and_rate)
    return graph
