"""The node that times the VAE next to ComfyUI's own."""
