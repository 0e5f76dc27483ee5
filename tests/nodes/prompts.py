"""A round of fifty prompts that run every node of the pack, next to ComfyUI's own nodes.

Each round has the same kinds and sizes, and other pictures and noise, so no result of an earlier
round is reused. Some prompts fail, and some are stopped.
"""

import functools
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.nodes.diffusion import random_weights
from fast_video_vae.tests.nodes.lora.lora_models import lora_for
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import (
    AUTO,
    UPSCALE,
    VAE_FILE,
    VIDEO,
    Link,
    Server,
    Workflow,
)
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.tiny import random_tiny
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

# Sides in pixels and numbers of frames, of the prompts of a kind in turn.
SIZES = ((64, 9), (96, 1), (80, 13), (128, 5))

# Files of small VAEs, and what makes their weights.
FAMILIES: dict[str, Callable[[], dict[str, Tensor]]] = {
    VAE_FILE: functools.partial(random_state_dict, 8),
    "wan22.safetensors": random_wan22,
    "qwen21.safetensors": random_qwen21,
    "seedvr2.safetensors": random_seedvr2,
}

RUNS, FAILS, STOPS = "runs", "fails", "stops"


@dataclass
class Prompt(Workflow):
    """A prompt with the nodes that this file's prompts share."""

    seed: int
    side: int
    frames: int
    ends: str
    name: str

    def encoded(self, vae: Link) -> Link:
        """The frames of the bundled clip at the size of this prompt, with noise of its seed."""
        return self.add("FastVAE_Encode", pixels=self.pictures(), vae=vae, batch="video")

    def pictures(self) -> Link:
        clip = self.add("FastVAE_DemoClip")
        few = self.add("ImageFromBatch", image=clip, batch_index=0, length=self.frames)
        size = {"width": self.side, "height": self.side, "upscale_method": "area"}
        scaled = self.add("ImageScale", image=few, crop="disabled", **size)
        return self.add("ImageAddNoise", image=scaled, seed=self.seed, strength=0.1)

    def expert(self, number: int) -> Link:
        file = f"expert-{number}.safetensors"
        return self.add("UNETLoader", unet_name=file, weight_dtype="default")

    def loras(self, number: int, strength: str) -> Link:
        file = f"lora-{number}.safetensors"
        return self.add("FastVAE_LoraStack", lora_name=file, strength=strength, blocks="")

    def texts(self) -> dict[str, Link]:
        clip = self.add("Test_Clip")
        words = f"a (red:1.{self.seed % 9}) fox\n---\nwaves {self.seed}"
        node, _ = self.add("FastVAE_TextEncode", clip=clip, positive=words, negative="blurry")
        return {"positive": [node, 0], "negative": [node, 1]}

    def shows(self, value: Link) -> None:
        self.add("SaveImage", images=value, filename_prefix=self.name)

    def keeps(self, latent: Link) -> None:
        self.add("SaveLatent", samples=latent, filename_prefix=self.name)


def there_and_back(prompt: Prompt) -> None:
    """Encode and decode with our loader and nodes, a VAE of each family in turn."""
    vae = prompt.load([*FAMILIES][prompt.seed % len(FAMILIES)])
    prompt.shows(prompt.add("FastVAE_Decode", samples=prompt.encoded(vae), vae=vae))


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
    codec = ("h264", "ffv1", "png")[prompt.seed % 3]
    options = VIDEO | {"codec": codec, "filename_prefix": prompt.name, "save_to": "output"}
    inputs = {"samples": prompt.encoded(vae), "vae": vae}
    if codec != "png":  # a folder of pictures has no sound
        inputs["audio"] = prompt.add("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
    video = prompt.add("FastVAE_DecodeVideo", **inputs, **options)
    prompt.keeps(prompt.add("FastVAE_EncodeVideo", video=video, vae=vae))


def upscales(prompt: Prompt) -> None:
    """Upscale a video to a file, in windows that overlap."""
    video = prompt.add("CreateVideo", images=prompt.pictures(), fps=16.0)
    inputs = {"video": video, "model": prompt.add("Test_SeedVR2"), "seed": prompt.seed}
    inputs |= {"vae": prompt.load("seedvr2.safetensors"), "filename_prefix": prompt.name}
    prompt.add("FastVAE_UpscaleVideo", **UPSCALE | inputs)


def previews(prompt: Prompt) -> None:
    """Show a latent and the window after it."""
    latent = prompt.encoded(prompt.load(VAE_FILE))
    latent = prompt.add("FastVAE_JoinLatents", samples=latent, overlap=0, hand_over=1, window=0)
    for decoder in ("auto", "latent2rgb"):
        node = {"samples": latent, "decoder": decoder, "fps": 16.0}
        prompt.shows(prompt.add("FastVAE_PreviewLatent", **node))


def two_experts(prompt: Prompt) -> None:
    """Sample with both experts, their LoRAs and encoded texts."""
    texts, options = prompt.texts(), DEFAULTS | {"seed": prompt.seed, "steps": 2}
    inputs = {"model_high": prompt.expert(0), "model_low": prompt.expert(1), **texts}
    inputs |= {"loras_high": prompt.loras(0, "0.8"), "loras_low": prompt.loras(1, "0.5")}
    latent = prompt.latent(prompt.side, prompt.frames)
    prompt.keeps(prompt.add("FastVAE_WanSampler", latent_image=latent, **options, **inputs))


def one_model(prompt: Prompt) -> None:
    """Sample with ComfyUI's sampler and a model with LoRAs."""
    texts = prompt.texts()
    mode = ("auto", "stream", "bypass", "merged")[prompt.seed % 4]
    model = prompt.add("FastVAE_FuseMLP", model=prompt.expert(0))
    stack = prompt.loras(0, "0.8")
    model = prompt.add("FastVAE_ApplyLora", model=model, stack=stack, mode=mode)
    options = {"steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    options |= {"seed": prompt.seed, "denoise": 1.0, **texts}
    latent = prompt.latent(prompt.side, prompt.frames)
    prompt.keeps(prompt.add("KSampler", model=model, latent_image=latent, **options))


def measured(prompt: Prompt) -> None:
    """Measure a VAE, and hand it to another pack."""
    vae = prompt.load(VAE_FILE)
    size = {"width": 64, "height": 64, "frames": 5, "rounds": 1, "dtype": "auto"}
    inputs = {"samples": prompt.encoded(vae), "task": "decode"}
    prompt.add("FastVAE_Benchmark", vae=vae, **inputs, **size)
    prompt.add("PreviewAny", source=prompt.add("FastVAE_ToWanVideoWrapper", vae=vae))


def bad_latent(prompt: Prompt) -> None:
    name = ("latent of NaN", "latent of 5 channels")[prompt.seed % 2]
    samples = prompt.add("Test_Value", name=name)
    prompt.shows(prompt.add("FastVAE_Decode", samples=samples, vae=prompt.load(VAE_FILE)))


def long_decode(prompt: Prompt) -> None:
    latent = prompt.latent(256, 1001 + prompt.seed % 97 * 4)
    prompt.shows(prompt.add("FastVAE_Decode", samples=latent, vae=prompt.load(VAE_FILE)))


# Kinds, how many of a round are of each (at most ten), and how they end.
KINDS: list[tuple[Callable[[Prompt], None], int, str]] = [
    (there_and_back, 10, RUNS),
    (core_nodes, 8, RUNS),
    (files, 6, RUNS),
    (upscales, 2, RUNS),
    (previews, 6, RUNS),
    (two_experts, 6, RUNS),
    (one_model, 6, RUNS),
    (measured, 2, RUNS),
    (bad_latent, 3, FAILS),
    (long_decode, 1, STOPS),
]


def mixed(number: int) -> list[Prompt]:
    """Return the prompts of a round, the kinds in turn."""
    made = []
    for at, (kind, count, ends) in itertools.product(range(10), KINDS):
        if at < count:
            seed = 100 * number + at
            made.append(Prompt(seed, *SIZES[at % 4], ends, f"{kind.__name__}-{seed}"))
            kind(made[-1])
    return made


def give_models(server: Server) -> None:
    """Put the models of the prompts where the server's loaders find them."""
    for name, weights in FAMILIES.items():
        save_file(weights(), server.models("vae") / name)
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
