"""The node that hands the VAE to WanVideoWrapper."""
