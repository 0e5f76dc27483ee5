"""The node that passes the VAE to WanVideoWrapper."""
