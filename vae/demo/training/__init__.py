"""How the bundled VAE was trained and the clip made; not part of the wheel."""
