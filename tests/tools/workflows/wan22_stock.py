"""ComfyUI's own Wan 2.2 14B graph, with two nodes changed."""

from .files import WAN21_VAE, WAN22_HIGH_LORA, WAN22_LOW_LORA
from .graph import FAST, Graph
from .picture import Block
from .texts import WAN_NEGATIVE, WAN_POSITIVE
from .wan22_14b import load_experts

TEXT = """
## Wan 2.2 14B, decoded fast

ComfyUI's own graph for text to video in 4 steps. **Two nodes** differ, those in the green
group: **Load VAE (Fast)** in place of Load VAE, and **VAE Decode to Video (Fast)** in place of VAE
Decode, Create Video and Save Video.

The file is AV1 in **10 bits**: no bands in the misty sky. For players that need it choose codec
`h264`; for grading `prores`.

The same two make any workflow faster. For the VAE of a checkpoint use **Accelerate VAE
(Fast)**.

### Files

FILES

### What to change

- **Prompt**: the negative one has no effect at cfg 1.
- **Size and length**: in **Latent**; 4 n + 1 frames, 16 per second.
- **Without the LoRAs**: bypass both; in both samplers use 20 steps, cfg 3.5, and change
  experts at step 10.
"""

_BLOCKS = (
    (Block("High noise", "14B"), Block("Low noise", "14B")),
    (Block("KSampler x 2", "as in ComfyUI's graph"),),
    (Block("Decode to Video (Fast)", "all that is exchanged", fast=True),),
    (Block("Video", "10 bits"),),
)


def graph() -> Graph:
    """Two experts one after the other, four steps, then the fast VAE."""
    graph = Graph("3 Wan 2.2 14B - stock graph made fast", TEXT, _BLOCKS)

    high, low, clip = load_experts(graph)

    column = graph.column(440)
    loras = column.group("2   4-step LoRAs and shift")
    models = []
    for model, lora in ((high, WAN22_HIGH_LORA), (low, WAN22_LOW_LORA)):
        patched = loras.add("LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=1)
        models.append(loras.add("ModelSamplingSD3", model=patched, shift=5))
    prompt = column.group("3   Prompt")
    positive = prompt.add("CLIPTextEncode", "Positive", 120, clip=clip, text=WAN_POSITIVE)
    negative = prompt.add(
        "CLIPTextEncode", "Negative", 120, stretch=True, clip=clip, text=WAN_NEGATIVE
    )

    column = graph.column(360)
    latent = column.group("4   Size and length").add(
        "EmptyHunyuanLatentVideo", "Latent", width=832, height=480, length=81
    )
    sampling = column.group("5   Sampling")
    words = {"positive": positive, "negative": negative}
    both = {"steps": 4, "cfg": 1, "sampler_name": "euler", "scheduler": "simple"}
    first = sampling.add(
        "KSamplerAdvanced",
        "Steps 1 and 2: high noise",
        model=models[0],
        latent_image=latent,
        add_noise="enable",
        noise_seed=1,
        start_at_step=0,
        end_at_step=2,
        return_with_leftover_noise="enable",
        **words,
        **both,
    )
    second = sampling.add(
        "KSamplerAdvanced",
        "Steps 3 and 4: low noise",
        model=models[1],
        latent_image=first,
        add_noise="disable",
        noise_seed=0,
        control_after_generate="fixed",
        start_at_step=2,
        end_at_step=4,
        return_with_leftover_noise="disable",
        **words,
        **both,
    )

    column = graph.column(420)
    fast = column.group("6   The two fast nodes", FAST)
    vae = fast.add("FastVAE_Load", vae_name=WAN21_VAE)
    fast.decode_video(420, "wan22", vae, second, fps=16, codec="av1", bit_depth="10")
    return graph
