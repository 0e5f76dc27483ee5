"""Wan 2.2 14B in four steps, with one sampler for both experts, straight into a file."""

from .files import UMT5, WAN21_VAE, WAN22_HIGH, WAN22_HIGH_LORA, WAN22_LOW, WAN22_LOW_LORA
from .graph import FAST, Graph, Node
from .picture import Block
from .texts import WAN_NEGATIVE, WAN_POSITIVE

TEXT = """
## Wan 2.2 14B: two experts, 4 steps

Text to video. **Wan Sampler (Fast)** runs both experts in one go and loads the second when the
first is done. The LoRAs are applied while the model runs: a new strength or file does not reload
it. The video is written to `output/video` while it is decoded.

### Files

FILES

### What to change

- **Size and length**: in **Latent**; 4 n + 1 frames, 16 per second.
- **LoRAs**: `strength` takes lists over the steps, such as `0.9,0.8`. Chain more LoRA Stack nodes
  for more files.
- **More motion**: preset `three-phase`.
- **Without LoRAs**: disconnect both, choose preset `base`: 40 steps with guidance.
"""

_BLOCKS = (
    (Block("High noise", "14B"), Block("Low noise", "14B")),
    (Block("LoRA Stack (Fast)", "two lightx2v LoRAs", fast=True),),
    (Block("Wan Sampler (Fast)", "4 steps, one node", fast=True),),
    (Block("Decode to Video (Fast)", fast=True),),
)


def graph() -> Graph:
    """Two models, two LoRAs, one sampler, one file."""
    graph = Graph("4 Wan 2.2 14B - two experts in four steps", TEXT, _BLOCKS)

    high, low, clip = load_experts(graph)

    column = graph.column(440)
    loras = column.group("2   4-step LoRAs", FAST)
    stacks = {
        f"loras_{noise}": loras.add(
            "FastVAE_LoraStack", f"LoRA of the {noise} noise expert", lora_name=lora, strength="1.0"
        )
        for noise, lora in (("high", WAN22_HIGH_LORA), ("low", WAN22_LOW_LORA))
    }
    latent = column.group("3   Size and length").add(
        "EmptyHunyuanLatentVideo", "Latent", width=832, height=480, length=81
    )
    words = column.group("4   Prompt", FAST).encode_text(260, clip, WAN_POSITIVE, WAN_NEGATIVE)

    column = graph.column(360)
    sampler = column.group("5   Sampling", FAST).add(
        "FastVAE_WanSampler",
        model_high=high,
        model_low=low,
        **words,
        latent_image=latent,
        preset="4-step",
        seed=1,
        **stacks,
    )
    # The node shows "model" and so on; with two experts the label says which one is meant.
    sampler.labels = {
        "model_high": "model (high noise)",
        "loras_high": "LoRAs (high noise)",
        "cfg_high": "CFG (high noise)",
        "shift_high": "shift (high noise)",
    }

    column = graph.column(420)
    result = column.group("6   Decode to a file", FAST)
    vae = result.add("FastVAE_Load", vae_name=WAN21_VAE)
    result.decode_video(600, "wan22_14b", vae, sampler["LATENT"], fps=16)
    return graph


def load_experts(graph: Graph) -> tuple[Node, Node, Node]:
    """A column of the two models and the text encoder."""
    models = graph.column(440).group("1   Models")
    high = models.add("UNETLoader", "High noise expert", unet_name=WAN22_HIGH)
    low = models.add("UNETLoader", "Low noise expert", unet_name=WAN22_LOW)
    return high, low, models.add("CLIPLoader", clip_name=UMT5, type="wan")
