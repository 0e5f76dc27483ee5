"""The command `fast-video-vae`."""
