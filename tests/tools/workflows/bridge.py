"""ComfyUI-WanVideoWrapper's nodes with our VAE."""

from .files import WAN21_VAE, WRAPPER_T2V, WRAPPER_T5
from .graph import FAST, Graph
from .picture import Block
from .texts import WAN_NEGATIVE, WAN_POSITIVE

TEXT = """
## ComfyUI-WanVideoWrapper with a fast VAE

For kijai's nodes, which ComfyUI-Manager installs: search for **ComfyUI-WanVideoWrapper**. **Load
VAE (Fast)** and **To WANVAE (Fast)** replace **WanVideo VAE Loader** in any workflow, for every
`vae` input of those nodes: image to video, VACE, the encoders.

### Files

FILES

### What to change

- **Model**: any other that the wrapper loads; Wan 2.2 5B needs `wan2.2_vae.safetensors`.
- **Tiles**: leave `enable_vae_tiling` off. A fast VAE uses tiles only if memory is short, and
  without seams.
- **More memory**: **WanVideo Block Swap** of the wrapper, at the model loader.
"""

_BLOCKS = (
    (Block("Load VAE (Fast)", fast=True),),
    (Block("To WANVAE (Fast)", fast=True),),
    (Block("WanVideo Decode", "and the wrapper's other nodes"),),
    (Block("Video"),),
)


def graph() -> Graph:
    """Text to video with the small model of Wan 2.1."""
    graph = Graph("9 WanVideoWrapper - with the fast VAE", TEXT, _BLOCKS)

    column = graph.column(420)
    models = column.group("1   Models")
    model = models.add("WanVideoModelLoader", model=WRAPPER_T2V, base_precision="bf16")
    encoder = models.add("LoadWanVideoT5TextEncoder", model_name=WRAPPER_T5, precision="bf16")

    column = graph.column(400)
    prompt = column.group("2   Prompt and size")
    size = prompt.add("WanVideoEmptyEmbeds", width=832, height=480, num_frames=81)
    words = prompt.add(
        "WanVideoTextEncode",
        least=420,
        stretch=True,
        t5=encoder,
        positive_prompt=WAN_POSITIVE,
        negative_prompt=WAN_NEGATIVE,
    )

    column = graph.column(360)
    sampler = column.group("3   Sampling").add(
        "WanVideoSampler",
        model=model,
        image_embeds=size,
        text_embeds=words,
        steps=30,
        cfg=6,
        shift=8,
        seed=1,
        scheduler="unipc",
    )

    column = graph.column(420)
    bridge = column.group("4   The fast VAE, for the wrapper", FAST)
    vae = bridge.add("FastVAE_Load", vae_name=WAN21_VAE)
    vae = bridge.add("FastVAE_ToWanVideoWrapper", vae=vae)
    result = column.group("5   Result")
    images = result.add(
        "WanVideoDecode", vae=vae, samples=sampler["samples"], enable_vae_tiling=False
    )
    result.save_video(260, "wanvideo", images=images, fps=16)
    return graph
