"""Prompts that run every node of the pack, next to ComfyUI's own nodes."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from fast_video_vae.tests.nodes.diffusion import random_weights
from fast_video_vae.tests.nodes.lora.lora_models import lora_for
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import AUTO, UPSCALE, VAE_FILE, VIDEO, Link, Server, Workflow
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.tiny import random_tiny

SEEDVR2_FILE = "seedvr2.safetensors"


class Prompt(Workflow):
    """A prompt with the nodes that this file's prompts share."""

    def encoded(self, vae: Link) -> Link:
        return self.add("FastVAE_Encode", pixels=self.pictures(), vae=vae, batch="video")

    def pictures(self) -> Link:
        """A few frames of the bundled clip, scaled down."""
        clip = self.add("FastVAE_DemoClip")
        few = self.add("ImageFromBatch", image=clip, batch_index=0, length=9)
        size = {"width": 64, "height": 64, "upscale_method": "area"}
        return self.add("ImageScale", image=few, crop="disabled", **size)

    def expert(self, number: int) -> Link:
        file = f"expert-{number}.safetensors"
        return self.add("UNETLoader", unet_name=file, weight_dtype="default")

    def loras(self, number: int, strength: str) -> Link:
        file = f"lora-{number}.safetensors"
        return self.add("FastVAE_LoraStack", lora_name=file, strength=strength, blocks="")

    def texts(self) -> dict[str, Link]:
        clip, words = self.add("Test_Clip"), "a (red:1.2) fox\n---\nwaves"
        node, _ = self.add("FastVAE_TextEncode", clip=clip, positive=words, negative="blurry")
        return {"positive": [node, 0], "negative": [node, 1]}

    def shows(self, value: Link) -> None:
        self.add("SaveImage", images=value, filename_prefix="x")

    def keeps(self, latent: Link) -> None:
        self.add("SaveLatent", samples=latent, filename_prefix="x")


def core_nodes(prompt: Prompt) -> None:
    """Encode and decode in tiles with ComfyUI's nodes and an accelerated VAE."""
    vae = prompt.add("FastVAE_Accelerate", vae=prompt.add("VAELoader", vae_name=VAE_FILE), **AUTO)
    tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    latent = prompt.add("VAEEncodeTiled", pixels=prompt.pictures(), vae=vae, **tiles)
    prompt.keeps(latent)
    prompt.shows(prompt.add("VAEDecodeTiled", samples=latent, vae=vae, **tiles))


def files(prompt: Prompt) -> None:
    """Decode to a file with sound, and encode that file."""
    vae = prompt.load()
    inputs = {"samples": prompt.encoded(vae), "vae": vae}
    inputs["audio"] = prompt.add("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
    video = prompt.add("FastVAE_DecodeVideo", **inputs, **VIDEO)
    prompt.keeps(prompt.add("FastVAE_EncodeVideo", video=video, vae=vae))


def upscales(prompt: Prompt) -> None:
    """Upscale a video to a file, in windows that overlap."""
    video = prompt.add("CreateVideo", images=prompt.pictures(), fps=16.0)
    inputs = {"video": video, "model": prompt.add("Test_SeedVR2")}
    prompt.add("FastVAE_UpscaleVideo", **UPSCALE, **inputs, vae=prompt.load(SEEDVR2_FILE))


def previews(prompt: Prompt) -> None:
    """Show a latent and the window after it, and decode them."""
    vae = prompt.load(VAE_FILE)
    latent = prompt.encoded(vae)
    latent = prompt.add("FastVAE_JoinLatents", samples=latent, overlap=0, hand_over=1, window=0)
    for decoder in ("auto", "latent2rgb"):
        node = {"samples": latent, "decoder": decoder, "fps": 16.0}
        prompt.shows(prompt.add("FastVAE_PreviewLatent", **node))
    prompt.shows(prompt.add("FastVAE_Decode", samples=latent, vae=vae))


def two_experts(prompt: Prompt) -> None:
    """Sample with both experts, their LoRAs and encoded texts."""
    inputs = {"model_high": prompt.expert(0), "model_low": prompt.expert(1), **prompt.texts()}
    inputs |= {"loras_high": prompt.loras(0, "0.8"), "loras_low": prompt.loras(1, "0.5")}
    options = DEFAULTS | {"steps": 2, "latent_image": prompt.latent(64, 9)}
    prompt.keeps(prompt.add("FastVAE_WanSampler", **options, **inputs))


def one_model(prompt: Prompt) -> None:
    """Sample with ComfyUI's sampler and a model with LoRAs."""
    model = prompt.add("FastVAE_FuseMLP", model=prompt.expert(0))
    stack = prompt.loras(0, "0.8")
    model = prompt.add("FastVAE_ApplyLora", model=model, stack=stack, mode="auto")
    options = {"steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    options |= {"seed": 1, "denoise": 1.0, **prompt.texts()}
    latent = prompt.latent(64, 9)
    prompt.keeps(prompt.add("KSampler", model=model, latent_image=latent, **options))


def measured(prompt: Prompt) -> None:
    """Measure a VAE, and hand it to another pack."""
    vae = prompt.load(VAE_FILE)
    size = {"width": 64, "height": 64, "frames": 5, "rounds": 1, "dtype": "auto"}
    inputs = {"samples": prompt.encoded(vae), "task": "decode"}
    prompt.add("FastVAE_Benchmark", vae=vae, **inputs, **size)
    prompt.add("PreviewAny", source=prompt.add("FastVAE_ToWanVideoWrapper", vae=vae))


KINDS = (core_nodes, files, upscales, previews, two_experts, one_model, measured)


def give_models(server: Server) -> None:
    """Put the models of the prompts where the server's loaders find them."""
    save_file(random_seedvr2(), server.models("vae") / SEEDVR2_FILE)
    for seed in (0, 1):
        state = random_weights("wan21-t2v", seed)
        save_file(state, server.models("diffusion_models") / f"expert-{seed}.safetensors")
        lora = {key: value.contiguous() for key, value in lora_for(state, seed=seed).items()}
        save_file(lora, server.models("loras") / f"lora-{seed}.safetensors")
    save_file(random_tiny(16, seed=0), server.models("vae_approx") / "taew2_1.safetensors")


def give_nodes(base: Path) -> None:
    """Put the nodes of `extra_nodes.py`, with what they need, into the folder of a server."""
    here = Path(__file__).parent
    (base / "custom_nodes").mkdir(parents=True)
    shutil.copy(here / "extra_nodes.py", base / "custom_nodes")
    shutil.copy(here / "text" / "encoders.py", base)
    shutil.copy(here / "upscale" / "models.py", base)
