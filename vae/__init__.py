"""The causal video VAE of Wan 2.1 and Qwen-Image, channels-last and streaming."""

from .checkpoint import load_vae
from .config import VAEConfig
from .model import VideoVAE

__all__ = ["VAEConfig", "VideoVAE", "load_vae"]
