"""This VAE and others at the same work in the same run."""
