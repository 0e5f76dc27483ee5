"""Wan 2.2 5B makes a video of a picture, at 720p and 24 frames per second, with a look first."""

from .files import UMT5, WAN22_5B, WAN22_5B_VAE
from .graph import FAST, Graph
from .picture import Block
from .texts import WAN_NEGATIVE

TEXT = """
## Wan 2.2 5B: a picture becomes a video

5 seconds of 1280 x 704 at 24 frames per second. Choose a picture in **Load Image**, describe
what happens.

### A look first

1. Select **Preview Video Latent (Fast)** and press the **play button** above it. The clip is
   sampled and shown in low quality; nothing else is decoded.
2. Not what you want? Change the seed or the prompt, and look again.
3. You like it? Press **Run**. Sampling is not repeated, and the video is written to `output/video`
   while it is decoded.

The preview is sharper with `lighttaew2_2.safetensors` of
[lightx2v](https://huggingface.co/lightx2v/Autoencoders) in `models/vae_approx`.

### Files

FILES

### What to change

- **Size and length**: in **Wan22ImageToVideoLatent**; multiples of 32, 4 n + 1 frames.
- **Text to video**: disconnect `start_image`.
- **Quality**: 20 steps at shift 8 are ComfyUI's settings; for the published ones set `steps` to 0
  and the shift to `auto`: 50 steps.
"""

_POSITIVE = (
    "The camera slowly moves in. A gentle wind stirs, light and shadows drift across the scene. "
    "Cinematic, natural motion, high detail."
)

_BLOCKS = (
    (Block("Picture"), Block("Prompt")),
    (Block("Wan 2.2 5B", "1280 x 704, 121 frames"),),
    (Block("Wan Sampler (Fast)", fast=True),),
    (
        Block("Preview", "a look first", fast=True),
        Block("Decode", "if you like it", fast=True),
    ),
)


def graph() -> Graph:
    """One model, one picture, one file."""
    graph = Graph("5 Wan 2.2 5B - image to video", TEXT, _BLOCKS)

    column = graph.column(420)
    models = column.group("1   Models")
    model = models.add("UNETLoader", unet_name=WAN22_5B)
    clip = models.add("CLIPLoader", clip_name=UMT5, type="wan")

    column = graph.column(400)
    image = column.group("2   Picture").add("LoadImage", least=330, image="example.png")
    vae = column.group("3   The fast VAE", FAST).add("FastVAE_Load", vae_name=WAN22_5B_VAE)
    words = column.group("4   Prompt", FAST).encode_text(300, clip, _POSITIVE, WAN_NEGATIVE)

    column = graph.column(360)
    latent = column.group("5   Size and length").add(
        "Wan22ImageToVideoLatent", vae=vae, start_image=image, width=1280, height=704, length=121
    )
    sampler = column.group("6   Sampling", FAST).add(
        "FastVAE_WanSampler",
        model_high=model,
        **words,
        latent_image=latent,
        preset="base",
        seed=1,
        control_after_generate="fixed",
        steps=20,
        shift_high="8",
    )

    column = graph.column(420)
    look = column.group("7   A look first", FAST)
    look.add("FastVAE_PreviewLatent", least=420, samples=sampler["LATENT"], fps=24)
    column = graph.column(420)
    result = column.group("8   Decode to a file", FAST)
    result.decode_video(700, "wan22_5b", vae, sampler["LATENT"], fps=24)
    return graph
