"""Training of the bundled VAE and creation of the clip; not part of the wheel."""
