"""A picture speaks: InfiniteTalk in two windows that follow each other, with the sound."""

from .files import INFINITETALK, UMT5, WAN21_I2V, WAN21_I2V_LORA, WAN21_VAE, WAV2VEC2
from .graph import FAST, Column, Graph, Node, Output
from .picture import Block

TEXT = """
## InfiniteTalk: a picture speaks

Choose a portrait and an audio file of about 6 seconds, press **Run**. Two windows of 81 frames are
made one after the other: the second begins with the last 9 frames of the first, which are then
dropped, so that the lips stay in sync at 25 frames per second.

### Files

FILES

### What to change

- **Longer**: each window adds 72 frames, 2.9 seconds. Copy the group **Second window**, connect
  all frames so far to its `previous_frames`, and add its result to **Batch Images**.
- **Size**: in both **WanInfiniteTalkToVideo** nodes, the same.
- **Two speakers**: `mode`, with wan2.1_infiniteTalk_multi_fp16.safetensors.
"""

_POSITIVE = "A person talks to the camera, natural facial expressions, gentle movements of the head"

_NEGATIVE = "static, blurred, distorted face, deformed mouth, subtitles, low quality"

_BLOCKS = (
    (Block("Picture"), Block("Speech")),
    (Block("InfiniteTalk", "two windows of 81 frames"),),
    (Block("Wan Sampler (Fast)", fast=True),),
    (Block("VAE Decode (Fast)", fast=True),),
)


def graph() -> Graph:
    """Two windows, chained by frames."""
    graph = Graph("6 InfiniteTalk - audio to video", TEXT, _BLOCKS)

    column = graph.column(380)
    models = column.group("1   Models")
    model = models.add("UNETLoader", unet_name=WAN21_I2V)
    patch = models.add("ModelPatchLoader", name=INFINITETALK)

    column = graph.column(380)
    given = column.group("2   Picture and audio")
    image = given.add("LoadImage", least=330, stretch=True, image="example.png")
    sound = given.add("LoadAudio", audio="speech.wav")
    encoder = given.add("AudioEncoderLoader", audio_encoder_name=WAV2VEC2)
    audio = given.add("AudioEncoderEncode", audio_encoder=encoder, audio=sound)

    column = graph.column(380)
    fast = column.group("3   Fast VAE and LoRA", FAST)
    vae = fast.add("FastVAE_Load", vae_name=WAN21_VAE)
    stack = fast.add("FastVAE_LoraStack", lora_name=WAN21_I2V_LORA, strength="1.0")
    prompt = column.group("4   Prompt", FAST)
    clip = prompt.add("CLIPLoader", clip_name=UMT5, type="wan")
    words = prompt.encode_text(300, clip, _POSITIVE, _NEGATIVE)

    given = {
        "mode": "single_speaker",
        "model": model,
        "model_patch": patch,
        **words,
        "vae": vae,
        "start_image": image,
        "audio_encoder_output_1": audio,
        "width": 832,
        "height": 480,
        "length": 81,
        "motion_frame_count": 9,
    }
    column = graph.column(340)
    _, first = _window(column, "5   First window", given, stack, vae)
    column = graph.column(340)
    given["previous_frames"] = first
    window, second = _window(column, "6   Second window", given, stack, vae)

    column = graph.column(360)
    result = column.group("7   Result")
    rest = result.add(
        "ImageFromBatch",
        "Without the repeated frames",
        image=second,
        batch_index=window["trim_image"],
        length=4096,
    )
    frames = result.add("BatchImagesNode", **{"images.image0": first, "images.image1": rest})
    result.save_video(300, "infinitetalk", images=frames, audio=sound, fps=25)
    return graph


def _window(column: Column, title: str, given: dict, stack: Node, vae: Node) -> tuple[Node, Output]:
    """The nodes of one window: what conditions it, and its frames."""
    group = column.group(title)
    window = group.add("WanInfiniteTalkToVideo", **given)
    sampler = group.add(
        "FastVAE_WanSampler",
        model_high=window["model"],
        positive=window["positive"],
        negative=window["negative"],
        latent_image=window["latent"],
        loras_high=stack,
        preset="4-step",
        steps=6,
        seed=1,
    )
    frames = group.add("FastVAE_Decode", samples=sampler["LATENT"], vae=vae)
    return window, frames["IMAGE"]
