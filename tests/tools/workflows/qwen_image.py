"""Qwen-Image with a LoRA that needs eight steps."""

from .files import QWEN_CLIP, QWEN_IMAGE, QWEN_LORA, QWEN_VAE
from .graph import FAST, Graph
from .picture import Block

TEXT = """
## Qwen-Image with a LoRA, 8 steps

Text to image. The LoRA is applied while the model runs, so that its effect is not rounded away in
an fp8 model, and a new strength or file does not reload the model.

### Files

FILES

### What to change

- **More LoRAs**: chain **LoRA Stack (Fast)** nodes.
- **Size**: 1328 x 1328, 1664 x 928, 928 x 1664, 1472 x 1104, 1104 x 1472.
- **Without the LoRA**: disconnect it, choose preset `base`: 50 steps with guidance 4.
"""

_POSITIVE = (
    "A small bookshop on a rainy evening, warm light in the window, a hand-painted sign that "
    'reads "Slow Reads, Fast Frames". Reflections on wet cobblestones, photograph, 35 mm.'
)

_BLOCKS = (
    (Block("Qwen-Image fp8"),),
    (Block("LoRA Stack (Fast)", "8 steps", fast=True),),
    (Block("Wan Sampler (Fast)", fast=True),),
    (Block("VAE Decode (Fast)", "one picture", fast=True),),
)


def graph() -> Graph:
    """One model, one LoRA, one picture."""
    graph = Graph("7 Qwen-Image - LoRA of eight steps", TEXT, _BLOCKS)

    column = graph.column(420)
    models = column.group("1   Models")
    model = models.add("UNETLoader", unet_name=QWEN_IMAGE)
    clip = models.add("CLIPLoader", clip_name=QWEN_CLIP, type="qwen_image")

    column = graph.column(400)
    stack = column.group("2   8-step LoRA", FAST).add(
        "FastVAE_LoraStack", lora_name=QWEN_LORA, strength="1.0"
    )
    latent = column.group("3   Size").add(
        "EmptySD3LatentImage", "Latent", width=1328, height=1328, batch_size=1
    )
    words = column.group("4   Prompt", FAST).encode_text(260, clip, _POSITIVE, "")

    column = graph.column(360)
    sampler = column.group("5   Sampling", FAST).add(
        "FastVAE_WanSampler",
        model_high=model,
        **words,
        latent_image=latent,
        loras_high=stack,
        preset="8-step",
        seed=1,
        shift_high="3.1",
    )

    column = graph.column(420)
    fast = column.group("6   The fast VAE", FAST)
    vae = fast.add("FastVAE_Load", vae_name=QWEN_VAE)
    image = fast.add("FastVAE_Decode", samples=sampler["LATENT"], vae=vae)
    column.group("7   Result").add(
        "SaveImage", least=300, stretch=True, images=image, filename_prefix="qwen_image"
    )
    return graph
