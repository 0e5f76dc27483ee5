"""The bundled demonstration: a small trained VAE with the layout of Wan 2.1, and a short clip."""

from pathlib import Path

VAE_PATH = Path(__file__).parent / "vae.safetensors"
CLIP_PATH = Path(__file__).parent / "clip.mp4"
