"""Files of video, sound and latents."""
