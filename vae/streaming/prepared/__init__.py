"""The kernels of a VAE, built in the background."""
