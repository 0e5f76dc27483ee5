"""The bundled demonstration: a small trained VAE of the Wan 2.1 layout, and a short clip."""

from pathlib import Path

VAE_PATH = Path(__file__).parent / "vae.safetensors"
CLIP_PATH = Path(__file__).parent / "clip.mp4"
